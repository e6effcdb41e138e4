#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/check.h"

namespace cadre::cuda::sm90 {

constexpr int kBoxRows = 32;  // of x, in one load

struct RaggedRowsMaps {
  CUtensorMap w, x, y;
};

struct RaggedRowsArgs {
  const int32_t* offsets;
  const float* alpha;
  int64_t rows;
  int experts, cols, depth, band;
};

void ragged_rows_along(const RaggedRowsMaps&, const RaggedRowsArgs&, int blocks, cudaStream_t);
void ragged_rows_across(const RaggedRowsMaps&, const RaggedRowsArgs&, int blocks, cudaStream_t);

}  // namespace cadre::cuda::sm90
