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

/// Adds one stage, 16 kSixteens deep, to the sums of a consumer's 64 rows.
template <Tile kTile, int kWidth, int kSixteens>
__device__ inline void multiply_stage(const Shared<kTile>& shared, int stage, int consumer,
                                      float* sums, bool to_sums) {
  constexpr uint64_t kNextA = kNextSixteen<kTile.a_along>, kNextB = kNextSixteen<kTile.b_along>;
  const uint64_t a = matrix<kTile.a_along>(shared.a[stage] + consumer * kSlab, kSlab);
  const uint64_t b = matrix<kTile.b_along>(shared.b[stage], kSlab);
  pin<kWidth / 2>(sums);
  open_products();
#pragma unroll
  for (int k = 0; k < kSixteens; ++k)
    Product<kWidth, kTile.element>::template add<kTile.a_along, kTile.b_along>(
        sums, a + k * kNextA, b + k * kNextB, to_sums || k != 0);
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

/// The same transposed: columns of the sums become rows of the box.
template <Element kElement>
__device__ inline void put_chunk_transposed(const float* sums, uint32_t buffer) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) % kWarpgroup / 32;
#pragma unroll
  for (int j = 0; j < 8; j += 2)
    put_transposed(buffer + swizzled(8 * (j + lane / 16) + lane % 8, 2 * warp + lane / 8 % 2),
                   packed<kElement>(sums + 4 * j));
}

/// Writes 32 columns of floats as they lie.
__device__ inline void put_floats(const float* sums, uint32_t buffer) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) % kWarpgroup / 32;
  const int row = warp * 16 + lane / 4, pair = lane % 4;
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      put_pair(buffer + swizzled(row + 8 * half, 2 * j + pair / 2) + uint32_t(pair % 2 * 8),
               sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
}

/// The same transposed, as two boxes of 32 rows and 32 columns.
__device__ inline void put_floats_transposed(const float* sums, uint32_t buffer) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) % kWarpgroup / 32;
  const int col = warp % 2 * 16 + lane / 4;
  buffer += uint32_t(warp / 2 * (kChunkBytes / 2));
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int row = 8 * (i / 4) + 2 * (lane % 4) + i % 2, at = col + 8 * (i / 2 % 2);
    put_float(buffer + swizzled(row, at / 4) + uint32_t(at % 4 * 4), sums[i]);
  }
}

/// The chunks that a consumer may have on their way.
template <Tile kTile>
struct OutRing {
  uint8_t (&buffers)[kTile.buffers][kChunkBytes];
  Cursor<kTile.buffers> at;
};

/// The store of a tile: `fill(chunk, buffer)` writes a chunk, `put(chunk, buffer)` starts its copy.
/// The last ones leave while the next tile is multiplied.
template <Tile kTile, class Fill, class Put>
__device__ inline void store_tile(OutRing<kTile>& out, int chunks, Fill&& fill, Put&& put) {
  constexpr int kChunks = kTile.cols / kTile.chunk_cols;
  const bool leads = threadIdx.x % kWarpgroup == 0;
  const int barrier = 1 + int(threadIdx.x) / kWarpgroup;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk >= chunks) break;
    uint8_t* buffer = out.buffers[out.at.at];
    if (leads) wait_for_reads<kTile.buffers - 1>();
    sync_warps(barrier, kWarpgroup);
    fill(chunk, shared_address(buffer));
    fence_shared();
    sync_warps(barrier, kWarpgroup);
    if (leads) put(chunk, buffer), close_stores();
    out.at.next();
  }
}

}  // namespace cadre::cuda::sm90
