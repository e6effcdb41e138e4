#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/sm90/plain.h"
#include "cuda/sm90/tuning.h"

namespace cadre::cuda::sm90 {

constexpr int kBoxes = 8;  // of x: their heights are kBoxRows, 2 kBoxRows, ...
constexpr int kBoxRows = 16;
static_assert(kBoxes * kBoxRows * kCluster == kMostCols);
constexpr int kWeightRows = 128;  // of w along the contraction, in one load
constexpr int kWeightDepth = 64;  // of w across the contraction, in one load

constexpr int kRowsOfPart = 64;    // of y, in one store
constexpr int kRowsOfFloats = 32;  // of y, if it is fp32

/// Maps for the copy engine. With `experts`, an array in device memory, each expert has its own
/// map of its weight.
struct RaggedRowsMaps {
  CUtensorMap x[kBoxes], w, y;
  const CUtensorMap* experts = nullptr;
};

struct RaggedRowsArgs {
  const int32_t* offsets;
  unsigned long long* taken;  ///< tiles, zero at first; or null
  int64_t rows;
  int experts, cols, depth;
  int band = kBand;                   ///< see schedule::banded()
  const float* alpha = nullptr;       ///< [E]
  const float* beta = nullptr;        ///< [E]
  Plain c{};                          ///< [R, C], rows `step` apart
  Plain bias{};                       ///< [E, C], experts `step` apart
  const float* bias_scale = nullptr;  ///< [R]
  void* tail = nullptr;               ///< y, if rows of nobody become zero
  int64_t tail_step = 0;              ///< bytes from row to row of y

  CADRE_HD bool has_epilogue() const {
    return alpha != nullptr || beta != nullptr || bias.is_there();
  }
};

/// Which kernel: how w lies, and the types.
struct RaggedRowsKind {
  bool along = true;  ///< rows of w run along the contraction
  bool f16 = false;   ///< operands, else bf16
  bool floats = false;
};

void ragged_rows(const RaggedRowsKind&, const RaggedRowsMaps&, const RaggedRowsArgs&, int blocks,
                 cudaStream_t);

}  // namespace cadre::cuda::sm90
