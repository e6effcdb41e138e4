#pragma once
#include "cuda/device/matrices.h"
#include "cuda/sm90/ragged_rows.h"
#include "cuda/sm90/tile.h"
#include "formats/bf16.h"
#include "formats/fp16.h"
#include "schedule/expert_rows.h"

// What happens to accumulators between the last product and the store, where a problem asks for it.
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

/// The place of a thread's accumulators in 64 rows: see Wgmma.
struct ThreadPlace {
  int row, col;

  __device__ static ThreadPlace mine() {
    const int thread = int(threadIdx.x) % kWarpgroup;
    return {thread / kWarp * 16 + thread % kWarp / 4, 2 * (thread % 4)};
  }
  __device__ static int row_of(int i) { return 8 * (i / 2 % 2); }  ///< of accumulator i, beside row
  __device__ static int col_of(int i) { return 8 * (i / 4) + i % 2; }  ///< beside col
};

/// The bias of the two rows of w that a thread has of a part, and the factors that scale it, one a
/// column, of which a lane holds two for its warp. Read once a part, not once a sum.
class PartBias {
 public:
  __device__ PartBias(const RaggedRowsParams& params, const TileRecord& tile,
                      const TilePart& part) {
    const void* bias = of_expert(params.bias, tile.expert);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int col = part.row + ThreadPlace::mine().row + 8 * half;
      if (col < params.cols) bias_[half] = read(bias, params.bias.dtype, col);
    }
    const int row = part.col + 2 * (int(threadIdx.x) % kWarp);
    if (params.bias_scale == nullptr) return;
    if (row < tile.end) scales_.first = params.bias_scale[row];
    if (row + 1 < tile.end) scales_.second = params.bias_scale[row + 1];
  }
  /// By a whole warp.
  template <int kCount>
  __device__ void add(float (&to)[kCount]) const {
    static_assert(kCount <= kWarp);
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const int lane = i + int(threadIdx.x) % 4;  // it holds what scales these two columns
      const float first = __shfl_sync(0xffffffff, scales_.first, lane);
      const float second = __shfl_sync(0xffffffff, scales_.second, lane);
      to[i] = formats::fma(first, bias_[0], to[i]);
      to[i + 1] = formats::fma(second, bias_[0], to[i + 1]);
      to[i + 2] = formats::fma(first, bias_[1], to[i + 2]);
      to[i + 3] = formats::fma(second, bias_[1], to[i + 3]);
    }
  }

 private:
  float bias_[2] = {0, 0};
  Pair scales_{1, 1};
};

/// Which row and column of y an accumulator is, where rows of y are those of the accumulators.
class UprightPlace {
 public:
  __device__ explicit UprightPlace(const TilePart& part)
      : row_(part.row + ThreadPlace::mine().row), col_(part.col + ThreadPlace::mine().col) {}

  __device__ int row(int i) const { return row_ + ThreadPlace::row_of(i); }
  __device__ int col(int i) const { return col_ + ThreadPlace::col_of(i); }

 private:
  int row_, col_;
};

/// Adds bias_e[c] * bias_scale[r], as PartBias, where rows of y are rows of the accumulators.
template <int kCount>
__device__ inline void add_upright_bias(const RaggedRowsParams& params, const TileRecord& tile,
                                        const TilePart& part, float (&to)[kCount]) {
  const UprightPlace place(part);
  const void* bias = of_expert(params.bias, tile.expert);
  float scales[2] = {1, 1};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = place.row(2 * half);
    if (params.bias_scale != nullptr && row < tile.row_limit) scales[half] = params.bias_scale[row];
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int col = place.col(i);
    const float of_col = col < params.cols ? read(bias, params.bias.dtype, col) : 0;
    to[i] = formats::fma(scales[i / 2 % 2], of_col, to[i]);
  }
}

/// The factor of an expert's addend, which is not read where it is 0.
__device__ inline float beta_of(const RaggedRowsParams& params, int expert) {
  return params.beta == nullptr ? 0.0f : params.beta[expert];
}

/// y = alpha_e * sum + beta_e * c + bias_e * bias_scale; `add_c(to)` adds the second. Transposed:
/// rows of y are columns of the accumulators.
template <bool kTransposed, int kCount>
__device__ inline void finish_rows(const RaggedRowsParams& params, const TileRecord& tile,
                                   const TilePart& part, float (&to)[kCount], auto&& add_c) {
  const float of_w = params.w_scale == nullptr ? 1.0f : params.w_scale[tile.expert];
  const float alpha = params.alpha == nullptr ? of_w : params.alpha[tile.expert] * of_w;
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = part.accumulators[i] * alpha;
  add_c(to);
  if (!params.bias.is_there()) return;
  if constexpr (kTransposed)
    PartBias(params, tile, part).add(to);
  else
    add_upright_bias(params, tile, part, to);
}

/// Zeros in rows that belong to nobody, by the first two consumers of all blocks.
__device__ inline void zero_tail(const RaggedRowsParams& params, const TailRows& tail) {
  if (tail.data == nullptr) return;
  constexpr int kMany = kConsumers * kWarpgroup;
  if (int(threadIdx.x) >= kMany) return;
  const int64_t first = schedule::rows_used(params.offsets, params.expert_count, params.rows);
  const int64_t units = tail.row_bytes / 16;
  for (int64_t i = int64_t(blockIdx.x) * kMany + threadIdx.x; i < (params.rows - first) * units;
       i += int64_t(gridDim.x) * kMany) {
    char* row = static_cast<char*>(tail.data) + (first + i / units) * tail.step;
    reinterpret_cast<uint4*>(row)[i % units] = {};
  }
}

/// The factor of an expert's sums.
__device__ inline float alpha_of(const auto& params, int expert) {
  return params.alpha == nullptr ? 1.0f : params.alpha[expert];
}

}  // namespace cadre::cuda::sm90
