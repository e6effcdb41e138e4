#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/check.h"

namespace cadre::cuda::sm90 {

struct RaggedContractionMaps {
  CUtensorMap a, b, out;
};

struct RaggedContractionArgs {
  const int32_t* offsets;
  const float* alpha;
  int64_t rows;
  int experts, out_rows, cols, band;
  bool accumulate;
};

void ragged_contraction_bf16(const RaggedContractionMaps&, const RaggedContractionArgs&, int blocks,
                             cudaStream_t);
void ragged_contraction_f32(const RaggedContractionMaps&, const RaggedContractionArgs&, int blocks,
                            cudaStream_t);

}  // namespace cadre::cuda::sm90
