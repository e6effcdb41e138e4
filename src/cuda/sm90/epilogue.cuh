#pragma once
#include "cuda/sm90/ragged_contraction.h"
#include "cuda/sm90/ragged_rows.h"
#include "cuda/sm90/tile.h"
#include "formats/bf16.h"
#include "formats/fp16.h"
#include "schedule/expert_rows.h"

// What happens to sums between the last product and the store, where a problem asks for it.
namespace cadre::cuda::sm90 {

/// Element `at` of that type.
__device__ inline float read(const void* data, DType dtype, int64_t at) {
  if (dtype == DType::kF32) return static_cast<const float*>(data)[at];
  const uint16_t code = static_cast<const uint16_t*>(data)[at];
  return dtype == DType::kBf16 ? formats::Bf16::decode(code) : formats::Fp16::decode(code);
}

/// Sixteen-bit or fp32 numbers of one expert.
__device__ inline const void* of_expert(const Plain& p, int expert) {
  if (p.discrete != nullptr) return p.discrete[expert];
  const int64_t bytes = p.dtype == DType::kF32 ? 4 : 2;
  return static_cast<const char*>(p.data) + expert * p.step * bytes;
}

/// The place of a thread's sums in a tile of 64 rows: see Product.
struct ThreadPlace {
  int row, col;

  __device__ static ThreadPlace mine() {
    const int thread = int(threadIdx.x) % kWarpgroup;
    return {thread / 32 * 16 + thread % 32 / 4, 2 * (thread % 4)};
  }
  __device__ static int row_of(int i) { return 8 * (i / 2 % 2); }      ///< of sum i, beside row
  __device__ static int col_of(int i) { return 8 * (i / 4) + i % 2; }  ///< beside col
};

/// y = alpha_e * sum + beta_e * c + bias_e * bias_scale. Rows of y are columns of the sums.
template <int kSums>
__device__ inline void finish_rows(const RaggedRowsArgs& args, const Record& tile,
                                   const TilePart& part, float (&to)[kSums]) {
  const ThreadPlace place = ThreadPlace::mine();
  const float alpha = args.alpha == nullptr ? 1.0f : args.alpha[tile.expert];
  const float beta = args.beta == nullptr ? 0.0f : args.beta[tile.expert];
  const void* bias = args.bias.is_there() ? of_expert(args.bias, tile.expert) : nullptr;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    const int row = part.col + place.col + ThreadPlace::col_of(i);
    const int col = part.row + place.row + ThreadPlace::row_of(i);
    to[i] = part.sums[i] * alpha;
    if (row >= tile.end || col >= args.cols) continue;
    if (beta != 0) to[i] += beta * read(args.c.data, args.c.dtype, row * args.c.step + col);
    if (bias == nullptr) continue;
    const float scale = args.bias_scale == nullptr ? 1.0f : args.bias_scale[row];
    to[i] += scale * read(bias, args.bias.dtype, col);
  }
}

/// Zeros in rows of y that belong to nobody, by the consumers of all blocks.
template <Tile kTile>
__device__ inline void zero_tail(const RaggedRowsArgs& args) {
  constexpr int kMany = kConsumers * kWarpgroup;
  const int64_t first = schedule::rows_used(args.offsets, args.experts, args.rows);
  const int64_t units = int64_t(args.cols) * (kTile.to_floats ? 4 : 2) / 16;
  for (int64_t i = int64_t(blockIdx.x) * kMany + threadIdx.x; i < (args.rows - first) * units;
       i += int64_t(gridDim.x) * kMany) {
    char* row = static_cast<char*>(args.tail) + (first + i / units) * args.tail_step;
    reinterpret_cast<uint4*>(row)[i % units] = {};
  }
}

/// dw = alpha_e * sum; 16-bit numbers that dw held are
/// added, since the copy engine would round twice.
template <Tile kTile, int kSums>
__device__ inline void finish_contraction(const RaggedContractionArgs& args, const Record& tile,
                                          const TilePart& part, float (&to)[kSums]) {
  const ThreadPlace place = ThreadPlace::mine();
  const float alpha = args.alpha == nullptr ? 1.0f : args.alpha[tile.expert];
  const bool adds = !kTile.to_floats && args.accumulates(tile.expert);
  const void* dw = of_expert(args.dw, tile.expert);
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    const int row = part.row + place.row + ThreadPlace::row_of(i);
    const int col = part.col + place.col + ThreadPlace::col_of(i);
    to[i] = part.sums[i] * alpha;
    if (adds && row < args.out_rows && col < args.cols)
      to[i] += read(dw, args.dw.dtype, row * args.dw_step + col);
  }
}

}  // namespace cadre::cuda::sm90
