#pragma once
#include <cuda_runtime_api.h>

#include "cuda/portable/operand.h"

namespace cadre::cuda::portable {

struct RaggedRowsArgs {
  Operand x, w;
  OutputMatrix y, c;                 ///< c as y
  const int32_t* offsets = nullptr;  ///< null: one expert has all rows
  int64_t rows = 0, cols = 0, depth = 0;
  int experts = 0;
  bool zero_tail = false;
  const float* alpha = nullptr;       ///< [E]
  const float* beta = nullptr;        ///< [E]
  OutputMatrix bias{};                ///< [E, C]: one line an expert
  const float* bias_scale = nullptr;  ///< [R]
  int32_t all_rows[2] = {};           ///< offsets where none are given
};

void ragged_rows(Multiplicand as, const RaggedRowsArgs&, int blocks, cudaStream_t);

}  // namespace cadre::cuda::portable
