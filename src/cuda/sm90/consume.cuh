#pragma once
#include <utility>

#include "cuda/sm90/tile.h"

// The consumers' half of a grouped GEMM kernel: products of the stages that arrive, then the store.
namespace cadre::cuda::sm90 {

/// Frees a stage in both blocks, since either loads into both.
template <Tile kTile>
__device__ inline void release(Shared<kTile>& shared, int stage) {
  const uint32_t lane = threadIdx.x % 32;
  if (lane < kCluster) arrive_cluster(shared.empty[stage], lane);
}

/// Adds the products of one stage, 16 kSixteens deep, to the sums of a consumer's 64 rows.
template <Tile kTile, int kWidth, int kSixteens>
__device__ inline void multiply_stage(const Shared<kTile>& shared, int stage, int consumer,
                                      float* sums, bool to_sums) {
  constexpr uint64_t kNextA = kDescriptorStep<kTile.a_along>,
                     kNextB = kDescriptorStep<kTile.b_along>;
  const uint64_t a =
      matrix<kTile.a_along>(shared.a[stage] + consumer * kTile.slab_bytes(), kTile.slab_bytes());
  const uint64_t b = matrix<kTile.b_along>(shared.b[stage], kTile.slab_bytes());
  pin<kWidth / 2>(sums);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSixteens; ++k)
    Product<kWidth, kTile.element>::template add<kTile.a_along, kTile.b_along>(
        sums, a + k * kNextA, b + k * kNextB, to_sums || k != 0);
  wgmma_commit();
  pin<kWidth / 2>(sums);
}

/// The last stage of a tile, as deep as it is.
template <Tile kTile, int kWidth, int kSixteens = 1>
__device__ inline void multiply_rest(const Shared<kTile>& shared, int stage, int consumer,
                                     float* sums, const Record& tile) {
  if constexpr (kSixteens < kTile.depth / 16) {
    if ((tile.depth - 1) % kTile.depth >= 16 * kSixteens)
      return multiply_rest<kTile, kWidth, kSixteens + 1>(shared, stage, consumer, sums, tile);
  }
  multiply_stage<kTile, kWidth, kSixteens>(shared, stage, consumer, sums, tile.depth > kTile.depth);
}

/// The sums of a consumer's rows of a tile.
struct Share {
  int consumer;
  float* sums;
};

/// All products of a tile of that width. One group stays under way while the next stage is awaited,
/// and the last while `meanwhile()` is done.
template <Tile kTile, int kWidth>
__device__ inline void multiply_width(Shared<kTile>& shared, Cursor<kTile.stages>& at,
                                      const Record& tile, const Share& mine, auto&& meanwhile) {
  constexpr int kRest = kTile.ragged_depth ? kTile.depth : 0;
  int before = 0;
  for (int depth = 0; depth < tile.depth - kRest; depth += kTile.depth, at.next()) {
    wait(shared.full[at.at], at.parity);
    multiply_stage<kTile, kWidth, kTile.depth / 16>(shared, at.at, mine.consumer, mine.sums,
                                                    depth != 0);
    wgmma_wait<1>();
    if (depth != 0) release(shared, before);
    before = at.at;
  }
  if constexpr (kTile.ragged_depth) {
    wait(shared.full[at.at], at.parity);
    multiply_rest<kTile, kWidth>(shared, at.at, mine.consumer, mine.sums, tile);
    wgmma_wait<1>();
    if (tile.depth > kTile.depth) release(shared, before);
    before = at.at;
    at.next();
  }
  meanwhile();
  wgmma_wait<0>();
  pin<kWidth / 2>(mine.sums);
  release(shared, before);
}

/// Lets all stages of a tile pass. A lane that arrived before another had looked would let the
/// producer go a whole round ahead of that one.
template <Tile kTile>
__device__ inline void skip(Shared<kTile>& shared, Cursor<kTile.stages>& at, const Record& tile) {
  for (int depth = 0; depth < tile.depth; depth += kTile.depth, at.next()) {
    wait(shared.full[at.at], at.parity);
    __syncwarp();
    release(shared, at.at);
  }
}

/// first, first + step, ..., last.
struct Widths {
  int step, first, last;
};

/// The same for the narrowest of these widths that covers the tile.
template <Tile kTile, Widths kWidths>
__device__ inline void multiply(Shared<kTile>& shared, Cursor<kTile.stages>& at, const Record& tile,
                                const Share& mine, auto&& meanwhile) {
  constexpr int kStep = kWidths.step, kFirst = kWidths.first, kLast = kWidths.last;
  if constexpr (kFirst < kLast) {
    constexpr int kMiddle = (kFirst + kLast) / 2 / kStep * kStep;
    if (tile.end - tile.begin <= kMiddle)
      multiply<kTile, Widths{kStep, kFirst, kMiddle}>(shared, at, tile, mine, meanwhile);
    else
      multiply<kTile, Widths{kStep, kMiddle + kStep, kLast}>(shared, at, tile, mine, meanwhile);
  } else {
    multiply_width<kTile, kFirst>(shared, at, tile, mine, meanwhile);
  }
}

template <Element kElement>
__device__ inline uint32_t pack(float first, float second) {
  return kElement == Element::kBf16 ? pack_bf16(first, second) : pack_f16(first, second);
}

/// Sixteen columns of sums as two pairs of 8 x 8 matrices.
template <Element kElement>
__device__ inline Matrices packed(const float* s) {
  return {pack<kElement>(s[0], s[1]), pack<kElement>(s[2], s[3]), pack<kElement>(s[4], s[5]),
          pack<kElement>(s[6], s[7])};
}

/// Where sixteen bytes of a box lie: rows of 128 bytes, swizzled.
__device__ inline uint32_t swizzled(int row, int sixteen) {
  return uint32_t(row * 128 + ((sixteen ^ (row & 7)) << 4));
}

/// Writes 64 columns of 16-bit outputs as they lie: 64 rows of 64.
template <Element kElement>
__device__ inline void put_part(const float* sums, uint32_t buffer) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) % kWarpgroup / 32;
#pragma unroll
  for (int j = 0; j < 8; j += 2)
    stmatrix(buffer + swizzled(warp * 16 + lane % 16, j + lane / 16),
             packed<kElement>(sums + 4 * j));
}

/// The same of kCols columns, transposed: columns of the sums become rows of the box.
template <Element kElement, int kCols>
__device__ inline void put_part_transposed(const float* sums, uint32_t buffer) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) % kWarpgroup / 32;
#pragma unroll
  for (int j = 0; j < kCols / 8; j += 2)
    stmatrix_trans(buffer + swizzled(8 * (j + lane / 16) + lane % 8, 2 * warp + lane / 8 % 2),
                   packed<kElement>(sums + 4 * j));
}

/// Where a thread's pairs of 32 columns of floats lie, and in which order it reads and writes them:
/// threads of odd rows exchange columns 0 to 15 and 16 to 31, so that the pairs of half a warp fall
/// into different banks.
struct Pairs {
  uint32_t buffer;
  int row, unit;  // of sixteen bytes
  bool odd;

  __device__ explicit Pairs(uint32_t to) : buffer(to) {
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) % kWarpgroup / 32;
    row = warp * 16 + lane / 4, unit = lane % 4 / 2, odd = row % 2 != 0;
    buffer += uint32_t(lane % 2 * 8);
  }
  /// Pair i of four, of the row, or of the one eight below.
  __device__ uint32_t at(int i, int half) const {
    return buffer + swizzled(row + 8 * half, 2 * (odd ? i ^ 2 : i) + unit);
  }
};

/// Writes 32 columns of floats as they lie.
__device__ inline void put_floats(const float* sums, uint32_t buffer) {
  const Pairs pairs(buffer);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int here = 2 * i, there = 2 * (i ^ 4);
    st_shared_pair(pairs.at(i / 2, i % 2), pairs.odd ? sums[there] : sums[here],
                   pairs.odd ? sums[there + 1] : sums[here + 1]);
  }
}

/// Sums plus the 32 columns of floats that lie there.
__device__ inline void add_floats(const float* sums, uint32_t buffer, float (&to)[16]) {
  const Pairs pairs(buffer);
  Pair old[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) old[i] = ld_shared_pair(pairs.at(i / 2, i % 2));
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    to[2 * i] = add_rounded(sums[2 * i], pairs.odd ? old[i ^ 4].first : old[i].first);
    to[2 * i + 1] = add_rounded(sums[2 * i + 1], pairs.odd ? old[i ^ 4].second : old[i].second);
  }
}

/// The same of kCols columns, transposed, as two boxes of kCols rows and 32 columns.
template <int kCols>
__device__ inline void put_floats_transposed(const float* sums, uint32_t buffer) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) % kWarpgroup / 32;
  const int col = warp % 2 * 16 + lane / 4;
  buffer += uint32_t(warp / 2 * (kCols * 128));
#pragma unroll
  for (int i = 0; i < kCols / 2; ++i) {
    const int row = 8 * (i / 4) + 2 * (lane % 4) + i % 2, at = col + 8 * (i / 2 % 2);
    st_shared(buffer + swizzled(row, at / 4) + uint32_t(at % 4 * 4), sums[i]);
  }
}

/// How many parts of a tile are stored, and of how many of them the old output is loaded.
struct Parts {
  int count, loaded;
};

/// A ring of buffers on their way out, as a consumer or its carrier sees it.
template <Tile kTile>
struct OutRing {
  uint8_t (&buffers)[kTile.buffers][kTile.part_bytes()];
  Barrier (&done)[kTile.buffers];
  Cursor<kTile.buffers> at{};
  uint32_t parities = 0;  ///< of the consumer's free[], a bit each

  __device__ OutRing(Shared<kTile>& shared, int ring)
      : buffers(shared.out[ring]), done(shared.done[ring]) {}

  /// Leaves so many buffers to the other consumer.
  __device__ void pass(int parts) { at.at = (at.at + parts) % kTile.buffers; }
};

/// The consumer's side of a tile: `fill(part, to)` writes a part.
template <Tile kTile, class Fill>
__device__ inline void fill_tile(OutRing<kTile>& out, Barrier (&free)[kTile.buffers], int parts,
                                 Fill&& fill) {
#pragma unroll
  for (int part = 0; part * kTile.part_cols < kTile.cols; ++part) {
    if (part >= parts) break;
    const int at = out.at.at;
    wait(free[at], out.parities >> at & 1);
    out.parities ^= 1u << at;
    fill(part, shared_address(out.buffers[at]));
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(out.done[at]);
    out.at.next();
  }
}

/// A consumer's work: the products of every tile, then its `parts_of(tile)` parts, each of which
/// `fill(tile, part, number, to)` writes.
template <Tile kTile, Widths kWidths>
__device__ inline void consume_tiles(Shared<kTile>& shared, int consumer, auto&& parts_of,
                                     auto&& fill) {
  Cursor<kTile.stages> at;
  Cursor<kRecords> ring;
  OutRing<kTile> out(shared, consumer % kTile.rings());
  float sums[kTile.cols / 2] = {};
  Record next = hear(shared, ring);
  while (next.expert >= 0) {
    const Record tile = next;
    const auto hear_next = [&] { next = hear(shared, ring); };
    const bool is_mine = is_for(tile, consumer);
    if (is_mine) {
      multiply<kTile, kWidths>(shared, at, tile, {consumer, sums}, hear_next);
    } else {
      skip(shared, at, tile);
      hear_next();
    }
    const int parts = parts_of(tile);
    const int others = kTile.turns && is_for(tile, 1 - consumer) ? parts : 0;
    if (consumer != 0) out.pass(others);
    if (is_mine)
      fill_tile<kTile>(out, shared.free[consumer], parts, [&](int part, uint32_t to) {
        fill(tile,
             TilePart{sums + kTile.part_cols / 2 * part, tile.row + 64 * consumer,
                      tile.begin + kTile.part_cols * part},
             part, to);
      });
    if (consumer == 0) out.pass(others);
  }
}

/// The carrier's side: `get(part, to, barrier)` starts the load of the old output of a part,
/// `put(part, from)` the store of a new one. The last ones leave, and the next tile's old ones
/// come, while that is multiplied.
template <Tile kTile, class Get, class Put>
__device__ inline void carry_tile(OutRing<kTile>& out, Barrier (&free)[kTile.buffers],
                                  const Parts& parts, Get&& get, Put&& put) {
  Cursor<kTile.buffers> at = out.at, emptied = out.at;
  const auto free_next = [&](int part) {
    if (part >= parts.count) return;
    if (part < parts.loaded) {
      arrive_expect_tx(free[at.at], kTile.part_bytes());
      get(part, out.buffers[at.at], free[at.at]);
    } else {
      arrive(free[at.at]);
    }
    at.next();
  };
  [&]<int... kParts>(std::integer_sequence<int, kParts...>) {
    ((tma_wait_read<kTile.buffers - 1 - kParts>(), free_next(kParts)), ...);
  }
  (std::make_integer_sequence<int, kTile.buffers>{});
  for (int i = 0; i < parts.count; ++i, out.at.next()) {
    wait(out.done[out.at.at], out.at.parity);
    put(i, out.buffers[out.at.at]);
    tma_commit();
    if (i == 0 || i - 1 + kTile.buffers >= parts.count) continue;
    tma_wait_read<1>();
    arrive(free[emptied.at]);
    emptied.next();
  }
}

}  // namespace cadre::cuda::sm90
