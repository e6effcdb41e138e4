#pragma once
#include "cuda/sm90/tile.h"

// The consumers' half of a grouped GEMM kernel: products of the stages that arrive, then the store.
namespace cadre::cuda::sm90 {

/// Frees a stage in both blocks, since either loads into both.
template <Tile kTile>
__device__ inline void release(Shared<kTile>& shared, int stage) {
  const uint32_t lane = threadIdx.x % 32;
  if (lane < kCluster) arrive_at(shared.empty[stage], lane);
}

/// Adds one stage, 16 kSixteens deep, to the sums of a consumer's 64 rows. What is wider than one
/// instruction is a widest one and a rest: two of other widths would not find their sums in the
/// registers where those of narrower tiles are.
template <Tile kTile, int kWidth, int kSixteens>
__device__ inline void multiply_stage(const Shared<kTile>& shared, int stage, int consumer,
                                      float* sums, bool to_sums) {
  constexpr uint64_t kNextA = kNextSixteen<kTile.a_along>, kNextB = kNextSixteen<kTile.b_along>;
  constexpr int kFirst = kWidth < kProductCols ? kWidth : kProductCols, kRest = kWidth - kFirst;
  static_assert(kRest == 0 || kTile.b_along, "the rest begins at a row of b, not within a slab");
  const uint64_t a = matrix<kTile.a_along>(shared.a[stage] + consumer * kSlab, kSlab);
  const uint64_t b = matrix<kTile.b_along>(shared.b[stage], kSlab);
  const uint64_t rest = matrix<kTile.b_along>(shared.b[stage] + kFirst * 128, kSlab);
  pin<kWidth / 2>(sums);
  open_products();
#pragma unroll
  for (int k = 0; k < kSixteens; ++k) {
    Product<kFirst, kTile.element>::template add<kTile.a_along, kTile.b_along>(
        sums, a + k * kNextA, b + k * kNextB, to_sums || k != 0);
    if constexpr (kRest > 0)
      Product<kRest, kTile.element>::template add<kTile.a_along, kTile.b_along>(
          sums + kFirst / 2, a + k * kNextA, rest + k * kNextB, to_sums || k != 0);
  }
  close_products();
  pin<kWidth / 2>(sums);
}

/// The last stage of a tile, as deep as it is.
template <Tile kTile, int kWidth, int kSixteens = 1>
__device__ inline void multiply_rest(const Shared<kTile>& shared, int stage, int consumer,
                                     float* sums, const Record& tile) {
  if constexpr (kSixteens < kDepth / 16) {
    if ((tile.depth - 1) % kDepth >= 16 * kSixteens)
      return multiply_rest<kTile, kWidth, kSixteens + 1>(shared, stage, consumer, sums, tile);
  }
  multiply_stage<kTile, kWidth, kSixteens>(shared, stage, consumer, sums, tile.depth > kDepth);
}

/// All products of a tile of that width. One group stays under way while the next stage is awaited.
template <Tile kTile, int kWidth>
__device__ inline void multiply_width(Shared<kTile>& shared, Cursor<kTile.stages>& at,
                                      const Record& tile, int consumer, float* sums) {
  constexpr int kRest = kTile.ragged_depth ? kDepth : 0;
  int before = 0;
  for (int depth = 0; depth < tile.depth - kRest; depth += kDepth, at.next()) {
    wait(shared.full[at.at], at.parity);
    multiply_stage<kTile, kWidth, kDepth / 16>(shared, at.at, consumer, sums, depth != 0);
    wait_for_products<1>();
    if (depth != 0) release(shared, before);
    before = at.at;
  }
  if constexpr (kTile.ragged_depth) {
    wait(shared.full[at.at], at.parity);
    multiply_rest<kTile, kWidth>(shared, at.at, consumer, sums, tile);
    wait_for_products<1>();
    if (tile.depth > kDepth) release(shared, before);
    before = at.at;
    at.next();
  }
  wait_for_products<0>();
  pin<kWidth / 2>(sums);
  release(shared, before);
}

/// Lets all stages of a tile pass. A lane that arrived before another had looked would let the
/// producer go a whole round ahead of that one.
template <Tile kTile>
__device__ inline void skip(Shared<kTile>& shared, Cursor<kTile.stages>& at, const Record& tile) {
  for (int depth = 0; depth < tile.depth; depth += kDepth, at.next()) {
    wait(shared.full[at.at], at.parity);
    __syncwarp();
    release(shared, at.at);
  }
}

/// The same for the narrowest width, of kStep, 2 kStep, ..., that covers the tile.
template <Tile kTile, int kStep, int kWidth = kStep>
__device__ inline void multiply(Shared<kTile>& shared, Cursor<kTile.stages>& at, const Record& tile,
                                int consumer, float* sums) {
  if constexpr (kWidth < kTile.cols) {
    if (tile.end - tile.begin > kWidth)
      return multiply<kTile, kStep, kWidth + kStep>(shared, at, tile, consumer, sums);
  }
  multiply_width<kTile, kWidth>(shared, at, tile, consumer, sums);
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
__device__ inline void put_chunk(const float* sums, uint32_t buffer) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) % kWarpgroup / 32;
#pragma unroll
  for (int j = 0; j < 8; j += 2)
    put_matrices(buffer + swizzled(warp * 16 + lane % 16, j + lane / 16),
                 packed<kElement>(sums + 4 * j));
}

/// The same of kCols columns, transposed: columns of the sums become rows of the box.
template <Element kElement, int kCols>
__device__ inline void put_chunk_transposed(const float* sums, uint32_t buffer) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) % kWarpgroup / 32;
#pragma unroll
  for (int j = 0; j < kCols / 8; j += 2)
    put_transposed(buffer + swizzled(8 * (j + lane / 16) + lane % 8, 2 * warp + lane / 8 % 2),
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
    put_pair(pairs.at(i / 2, i % 2), pairs.odd ? sums[there] : sums[here],
             pairs.odd ? sums[there + 1] : sums[here + 1]);
  }
}

/// Sums plus the 32 columns of floats that lie there.
__device__ inline void add_floats(const float* sums, uint32_t buffer, float (&to)[16]) {
  const Pairs pairs(buffer);
  Pair old[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) old[i] = get_pair(pairs.at(i / 2, i % 2));
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
    put_float(buffer + swizzled(row, at / 4) + uint32_t(at % 4 * 4), sums[i]);
  }
}

/// How many chunks a tile has, and of how many of them the old output is loaded.
struct Chunks {
  int count, loaded;
};

/// The chunks that a consumer may have on their way, as it or its carrier sees them.
template <Tile kTile>
struct OutRing {
  uint8_t (&buffers)[kTile.buffers][kTile.chunk_bytes()];
  Barrier (&free)[kTile.buffers], (&done)[kTile.buffers];
  Cursor<kTile.buffers> at{};

  __device__ OutRing(Shared<kTile>& shared, int consumer)
      : buffers(shared.out[consumer]), free(shared.free[consumer]), done(shared.done[consumer]) {}
};

/// The consumer's side of a tile: `fill(chunk, buffer)` writes a chunk.
template <Tile kTile, class Fill>
__device__ inline void fill_tile(OutRing<kTile>& out, int chunks, Fill&& fill) {
  constexpr int kChunks = kTile.cols / kTile.chunk_cols;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk, out.at.next()) {
    if (chunk >= chunks) break;
    wait(out.free[out.at.at], out.at.parity);
    fill(chunk, shared_address(out.buffers[out.at.at]));
    fence_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(out.done[out.at.at]);
  }
}

/// The carrier's side: `get(chunk, buffer, barrier)` starts the load of the old output of a chunk,
/// `put(chunk, buffer)` the store of a new one. The last ones leave, and the next tile's old ones
/// come, while that is multiplied.
template <Tile kTile, class Get, class Put>
__device__ inline void carry_tile(OutRing<kTile>& out, const Chunks& chunks, Get&& get, Put&& put) {
  wait_for_reads<0>();
  Cursor<kTile.buffers> at = out.at;
  for (int chunk = 0; chunk < chunks.count && chunk < kTile.buffers; ++chunk, at.next()) {
    if (chunk >= chunks.loaded) {
      arrive(out.free[at.at]);
      continue;
    }
    arrive_expecting(out.free[at.at], kTile.chunk_bytes());
    get(chunk, out.buffers[at.at], out.free[at.at]);
  }
  for (int chunk = 0; chunk < chunks.count; ++chunk, out.at.next()) {
    wait(out.done[out.at.at], out.at.parity);
    put(chunk, out.buffers[out.at.at]);
    close_stores();
    if (chunk + kTile.buffers >= chunks.count) continue;
    wait_for_reads<0>();
    arrive(out.free[out.at.at]);
  }
}

}  // namespace cadre::cuda::sm90
