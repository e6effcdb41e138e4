#pragma once
#include <utility>

#include "cuda/device/matrices.h"
#include "cuda/device/tma.h"
#include "cuda/sm90/stages.h"
#include "cuda/sm90/tile.h"
#include "formats/ieee.h"

// What every Store is made of: parts of accumulators written into buffers as TMA stores them, and
// the ring of these buffers between the consumers and the store warps.
namespace cadre::cuda::sm90 {

template <DType kDType>
__device__ inline uint32_t pack(float first, float second) {
  return kDType == DType::kBf16 ? pack_bf16(first, second) : pack_f16(first, second);
}

template <DType kDType>
__device__ inline Pair unpack(uint32_t both) {
  return kDType == DType::kBf16 ? unpack_bf16(both) : unpack_f16(both);
}

/// A thread's share of a tile on its way out in turns, of which there are kAll at most.
template <class Turn, int kAll>
class Turns {
 public:
  Turn of[kAll];

  __device__ void begin(unsigned count) { at_ = 0, count_ = count; }
  __device__ bool is_empty() const { return at_ >= count_; }
  __device__ unsigned number() const { return at_; }
  __device__ Turn present() const { return find<0, kAll>(int(at_)); }
  /// Calls work() with the present turn, where it lies.
  __device__ void with_present(auto&& work) const { find<0, kAll>(int(at_), work); }
  __device__ void next() { ++at_; }

 private:
  /// By branches: an index would put all into memory.
  template <int kFirst, int kEnd>
  __device__ Turn find(int at) const {
    if constexpr (kFirst + 1 == kEnd) {
      return of[kFirst];
    } else {
      constexpr int kMiddle = (kFirst + kEnd) / 2;
      return at < kMiddle ? find<kFirst, kMiddle>(at) : find<kMiddle, kEnd>(at);
    }
  }
  template <int kFirst, int kEnd>
  __device__ void find(int at, auto&& work) const {
    if constexpr (kFirst + 1 == kEnd) {
      work(of[kFirst]);
    } else {
      constexpr int kMiddle = (kFirst + kEnd) / 2;
      at < kMiddle ? find<kFirst, kMiddle>(at, work) : find<kMiddle, kEnd>(at, work);
    }
  }

  unsigned at_ = 0, count_ = 0;
};

/// Sixteen columns of accumulators as two pairs of 8 x 8 matrices.
template <DType kDType>
__device__ inline Matrices packed(const float* s) {
  return {pack<kDType>(s[0], s[1]), pack<kDType>(s[2], s[3]), pack<kDType>(s[4], s[5]),
          pack<kDType>(s[6], s[7])};
}

/// Where sixteen bytes of a box lie: its rows are those of swizzle atoms.
__device__ inline uint32_t swizzled(int row, int sixteen) {
  return uint32_t(row * kAtomBytes + ((sixteen ^ (row & 7)) << 4));
}

/// The same of a box whose rows have 64 bytes.
__device__ inline uint32_t swizzled_64(int row, int sixteen) {
  return uint32_t(row * 64 + ((sixteen ^ (row / 2 & 3)) << 4));
}

/// And of 32.
__device__ inline uint32_t swizzled_32(int row, int sixteen) {
  return uint32_t(row * 32 + ((sixteen ^ (row / 4 & 1)) << 4));
}

/// The row of 16 columns, from column 16 * turn of a box on, that a thread names for its warp.
__device__ inline uint32_t place_upright(int turn) {
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) % kWarpgroup / kWarp;
  return swizzled(warp * 16 + lane % 16, 2 * turn + lane / 16);
}

/// Writes these columns of 16-bit outputs as they lie.
__device__ inline void write_turn_upright(const Matrices& columns, int turn, uint32_t buffer) {
  stmatrix(buffer + place_upright(turn), columns);
}

/// The same of 64 columns: 64 rows of 64.
template <DType kDType>
__device__ inline void write_halves(const float* accumulators, uint32_t buffer) {
#pragma unroll
  for (int turn = 0; turn < 4; ++turn)
    write_turn_upright(packed<kDType>(accumulators + 8 * turn), turn, buffer);
}

/// The row that a thread names where columns of the accumulators are rows of the box, from row
/// 16 * turn on.
__device__ inline uint32_t place_transposed(int turn) {
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) % kWarpgroup / kWarp;
  return swizzled(8 * (2 * turn + lane / 16) + lane % 8, 2 * warp + lane / 8 % 2);
}

/// Writes 16 columns of 16-bit outputs, transposed.
__device__ inline void write_turn_transposed(const Matrices& columns, int turn, uint32_t buffer) {
  stmatrix_trans(buffer + place_transposed(turn), columns);
}

/// The same of kCols columns.
template <DType kDType, int kCols>
__device__ inline void write_halves_transposed(const float* accumulators, uint32_t buffer) {
#pragma unroll
  for (int turn = 0; turn < kCols / 16; ++turn)
    write_turn_transposed(packed<kDType>(accumulators + 8 * turn), turn, buffer);
}

/// Adds `factor` times sixteen columns of a box, which a thread holds as packed() does.
template <DType kDType>
__device__ inline void add_scaled(float factor, const Matrices& columns, float* to) {
  const Pair pairs[] = {unpack<kDType>(columns.a), unpack<kDType>(columns.b),
                        unpack<kDType>(columns.c), unpack<kDType>(columns.d)};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = formats::fma(factor, pairs[i].first, to[2 * i]);
    to[2 * i + 1] = formats::fma(factor, pairs[i].second, to[2 * i + 1]);
  }
}

/// Adds `factor` times the 64 columns that lie where write_halves() writes.
template <DType kDType>
__device__ inline void add_halves(float factor, uint32_t buffer, float* to) {
#pragma unroll
  for (int turn = 0; turn < 4; ++turn)
    add_scaled<kDType>(factor, ldmatrix(buffer + place_upright(turn)), to + 8 * turn);
}

/// The same of what lies where write_halves_transposed() writes.
template <DType kDType, int kCols>
__device__ inline void add_halves_transposed(float factor, uint32_t buffer, float* to) {
#pragma unroll
  for (int turn = 0; turn < kCols / 16; ++turn)
    add_scaled<kDType>(factor, ldmatrix_trans(buffer + place_transposed(turn)), to + 8 * turn);
}

/// Where a thread's pairs of 32 columns of floats lie, and in which order it reads and writes them:
/// threads of odd rows exchange columns 0 to 15 and 16 to 31, so that the pairs of half a warp fall
/// into different banks.
struct Pairs {
  uint32_t buffer;
  int row, unit;  // of sixteen bytes
  bool odd;

  __device__ explicit Pairs(uint32_t to) : buffer(to) {
    const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) % kWarpgroup / kWarp;
    row = warp * 16 + lane / 4, unit = lane % 4 / 2, odd = row % 2 != 0;
    buffer += uint32_t(lane % 2 * 8);
  }
  /// Pair i of four, of the row, or of the one eight below.
  __device__ uint32_t at(int i, int half) const {
    return buffer + swizzled(row + 8 * half, 2 * (odd ? i ^ 2 : i) + unit);
  }
};

/// Writes 32 columns of floats as they lie.
__device__ inline void write_floats(const float* accumulators, uint32_t buffer) {
  const Pairs pairs(buffer);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int even = 2 * i, odd = 2 * (i ^ 4);
    st_shared_pair(pairs.at(i / 2, i % 2), pairs.odd ? accumulators[odd] : accumulators[even],
                   pairs.odd ? accumulators[odd + 1] : accumulators[even + 1]);
  }
}

/// Reads the 32 columns of floats that lie there.
__device__ inline void read_floats(uint32_t buffer, float (&to)[16]) {
  const Pairs pairs(buffer);
  Pair old[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) old[i] = ld_shared_pair(pairs.at(i / 2, i % 2));
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const Pair &even = old[i], &odd = old[i ^ 4];  // both known now: an array in registers
    to[2 * i] = pairs.odd ? odd.first : even.first;
    to[2 * i + 1] = pairs.odd ? odd.second : even.second;
  }
}

/// Where a thread's floats of a part lie that is transposed: as two boxes of kCols rows and 32
/// columns.
template <int kCols>
struct TransposedFloats {
  uint32_t buffer;
  int lane, col;

  __device__ explicit TransposedFloats(uint32_t to) : buffer(to) {
    const int warp = int(threadIdx.x) % kWarpgroup / kWarp;
    lane = int(threadIdx.x) % kWarp, col = warp % 2 * 16 + lane / 4;
    buffer += uint32_t(warp / 2 * (kCols * kAtomBytes));
  }
  /// Accumulator i.
  __device__ uint32_t at(int i) const {
    const int row = 8 * (i / 4) + 2 * (lane % 4) + i % 2, at = col + 8 * (i / 2 % 2);
    return buffer + swizzled(row, at / 4) + uint32_t(at % 4 * 4);
  }
};

/// Writes kCols columns of floats, transposed.
template <int kCols>
__device__ inline void write_floats_transposed(const float* accumulators, uint32_t buffer) {
  const TransposedFloats<kCols> floats(buffer);
#pragma unroll
  for (int i = 0; i < kCols / 2; ++i) st_shared(floats.at(i), accumulators[i]);
}

/// Adds `factor` times what lies there.
template <int kCols>
__device__ inline void add_floats_transposed(float factor, uint32_t buffer, float* to) {
  const TransposedFloats<kCols> floats(buffer);
#pragma unroll
  for (int i = 0; i < kCols / 2; ++i)
    to[i] = formats::fma(factor, ld_shared_float(floats.at(i)), to[i]);
}

/// Writes accumulators as they lie: 64 columns of 16-bit outputs, 32 of floats.
template <DType kDType>
__device__ inline void write_upright(const float* accumulators, uint32_t buffer) {
  if constexpr (kDType == DType::kF32)
    write_floats(accumulators, buffer);
  else
    write_halves<kDType>(accumulators, buffer);
}
/// Adds `factor` times what lies where write_upright() writes.
template <DType kDType, int kCount>
__device__ inline void add_upright(float factor, uint32_t buffer, float (&to)[kCount]) {
  if constexpr (kDType == DType::kF32) {
    float old[kCount];
    read_floats(buffer, old);
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = formats::fma(factor, old[i], to[i]);
  } else {
    add_halves<kDType>(factor, buffer, to);
  }
}

constexpr int cols_of_upright_part(DType out) { return out == DType::kF32 ? 32 : 64; }

/// A ring of buffers on their way out, as a consumer or a store warp sees it.
template <OutputShape kShape>
struct OutputRing {
  uint8_t (&buffers)[kShape.buffers][kShape.part_bytes()];
  Barrier (&full)[kShape.buffers];
  Cursor<kShape.buffers> at{};
  uint32_t parities = 0;  ///< of the consumer's empty[], a bit each

  /// A consumer's next buffer, once it is empty, and passed on to the store warp.
  __device__ void wait_empty(Barrier (&empty)[kShape.buffers]) {
    wait(empty[at.at], parities >> at.at & 1);
    parities ^= 1u << at.at;
  }
  __device__ uint32_t buffer() const { return shared_address(buffers[at.at]); }
  __device__ void pass_on() {
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % kWarp == 0) arrive(full[at.at]);
    at.next();
  }
  /// Leaves so many buffers to other consumers.
  __device__ void pass(int parts) { at.at = (at.at + parts) % kShape.buffers; }
};

/// The consumer's side of a tile: `write(part, to)` writes a part.
template <OutputShape kShape, int kCols>
__device__ inline void write_parts(OutputRing<kShape>& out, Barrier (&empty)[kShape.buffers],
                                   int parts, auto&& write) {
  static_assert(kCols % kShape.part_cols == 0);
#pragma unroll
  for (int part = 0; part * kShape.part_cols < kCols; ++part) {
    if (part >= parts) break;
    out.wait_empty(empty);
    write(part, out.buffer());
    out.pass_on();
  }
}

/// The store warp's side of so many parts: `free(number, buffer)` lets the consumer of a part have
/// a buffer, once its old output is loaded where there is one; `store(number, from)` starts the
/// store of a new part. The last ones leave, and the next tile's old ones come, while that is
/// multiplied.
template <OutputShape kShape>
__device__ inline void store_parts(OutputRing<kShape>& out, int count, auto&& free, auto&& store) {
  Cursor<kShape.buffers> at = out.at;
  const auto free_next = [&](int number) {
    if (number >= count) return;
    free(number, at.at);
    at.next();
  };
  [&]<int... kParts>(std::integer_sequence<int, kParts...>) {
    ((tma_wait_read<kShape.buffers - 1 - kParts>(), free_next(kParts)), ...);
  }
  (std::make_integer_sequence<int, kShape.buffers>{});
  for (int i = 0; i < count; ++i, out.at.next()) {
    wait_asleep(out.full[out.at.at], out.at.parity);
    store(i, out.buffers[out.at.at]);
    tma_commit();
    if (i == 0 || i - 1 + kShape.buffers >= count) continue;
    tma_wait_read<1>();
    free_next(i - 1 + kShape.buffers);
  }
}

/// A consumer's ring as the store warp of both sees it: how many of a tile's parts there are, have
/// been stored, and have freed their buffers.
template <OutputShape kShape>
struct StoredRing {
  OutputRing<kShape> out;
  Barrier (&empty)[kShape.buffers];
  Cursor<kShape.buffers> emptied{};
  int parts = 0, stored = 0, freed = 0;

  __device__ void begin(int count) {
    parts = count, stored = freed = 0, emptied = out.at;
    Cursor<kShape.buffers> at = out.at;
    for (int i = 0; i < kShape.buffers && i < parts; ++i, at.next()) arrive(empty[at.at]);
  }
  __device__ bool is_ready() const {
    return stored < parts && try_wait(out.full[out.at.at], out.at.parity);
  }
  __device__ void store(auto&& store) {
    store(stored++, out.buffers[out.at.at]);
    tma_commit();
    out.at.next();
  }
  /// The buffer of the oldest part that still had one.
  __device__ void free() {
    if (freed++ + kShape.buffers < parts) arrive(empty[emptied.at]);
    emptied.next();
  }
};

/// The store warp's side where it serves both rings: it takes whichever part is ready, since a
/// consumer may have to write before the other can go on.
template <OutputShape kShape>
__device__ inline void store_parts_of_both(StoredRing<kShape> (&rings)[kConsumers], auto&& store) {
  constexpr int kNobody = -1;
  int youngest = kNobody;  // whose store may still read its buffer
  const auto free_youngest = [&] {
#pragma unroll
    for (int consumer = 0; consumer < kConsumers; ++consumer)
      if (consumer == youngest) rings[consumer].free();
    youngest = kNobody;
  };
  const auto is_left = [&] {
    return rings[0].stored < rings[0].parts || rings[1].stored < rings[1].parts;
  };
  while (is_left()) {
    bool found = false;
#pragma unroll
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      if (!rings[consumer].is_ready()) continue;
      rings[consumer].store([&](int part, const uint8_t* from) { store(consumer, part, from); });
      tma_wait_read<1>();
      free_youngest();
      youngest = consumer, found = true;
    }
    if (found) continue;
    tma_wait_read<0>();
    free_youngest();
  }
}

}  // namespace cadre::cuda::sm90
