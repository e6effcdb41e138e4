#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "cuda/sm90/plain.h"
#include "cuda/sm90/tuning.h"

namespace cadre::cuda::sm90 {

constexpr int kBoxes = 8;  // of x: their heights are kBoxRows, 2 kBoxRows, ...
constexpr int kBoxRows = 16;
static_assert(kBoxes * kBoxRows * kCluster == kMostCols);
constexpr int kWeightRows = 128;  // of w, K-major, in one load
constexpr int kWeightDepth = 64;  // of w, MN-major, in one load

/// Columns of a tile in one part of its output: rows of y in one box.
constexpr int rows_of_part(DType out) { return out == DType::kF32 ? 32 : 64; }

/// An output whose rows that belong to nobody become zero; null: they stay.
struct TailRows {
  void* data = nullptr;
  int64_t step = 0, row_bytes = 0;
};

/// What the kernel of fprop and dgrad is launched with.
struct RaggedRowsParams {
  CUtensorMap x[kBoxes], w, y;
  CUtensorMap c;                         ///< as y's, if there is beta
  const CUtensorMap* experts = nullptr;  ///< [E] maps of w in device memory; null: all in w
  const int32_t* offsets = nullptr;
  unsigned long long* taken = nullptr;  ///< tiles, zero at first; null: tiles are dealt out
  int64_t rows = 0;
  int expert_count = 0, cols = 0, depth = 0;
  int band = kBand;                   ///< see schedule::banded()
  const float* alpha = nullptr;       ///< [E]
  const float* w_scale = nullptr;     ///< [E], a factor like alpha: of w's expert scales
  const float* beta = nullptr;        ///< [E]
  Plain bias{};                       ///< [E, C], experts `step` apart
  const float* bias_scale = nullptr;  ///< [R]
  TailRows tail{};                    ///< of y, if rows of nobody become zero

  CADRE_HD bool has_epilogue() const {
    return alpha != nullptr || w_scale != nullptr || beta != nullptr || bias.is_there();
  }
  /// Whether experts have so few rows that tiles are narrow.
  bool has_few_rows() const { return are_few_rows(rows, expert_count); }
  /// Whether consumers hold a tile's 16-bit output and write it beside the next tile's products:
  /// the sums, or alpha times them.
  bool holds_output() const {
    const int64_t each = std::min<int64_t>(rows / std::max(expert_count, 1), kMostCols);
    const bool adds = w_scale != nullptr || beta != nullptr || bias.is_there();
    return !adds && each * depth > kMostUnheld;
  }
};

/// Which instance: how the weight lies, the type of both operands, and that of the output.
struct RaggedRowsKind {
  bool k_major = true;  ///< rows of w run along the contraction, else across it
  DType in = DType::kBf16, out = DType::kBf16;

  bool operator==(const RaggedRowsKind&) const = default;
};

/// One instance, launched; instances/ has them, a file each.
template <RaggedRowsKind kKind>
void launch_ragged_rows(const RaggedRowsParams&, int blocks, cudaStream_t);

/// The instance of that kind; null if none was built.
using LaunchRaggedRows = void (*)(const RaggedRowsParams&, int blocks, cudaStream_t);
LaunchRaggedRows find_ragged_rows(const RaggedRowsKind&);

}  // namespace cadre::cuda::sm90
