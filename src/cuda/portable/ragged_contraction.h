#pragma once
#include <cuda_runtime_api.h>

#include "cadre/grouped_gemm.h"
#include "cuda/portable/operand.h"

namespace cadre::cuda::portable {

struct RaggedContractionArgs {
  Operand dy, x;
  OutputMatrix dw;
  const int32_t* offsets = nullptr;
  int64_t rows = 0, n = 0, k = 0;
  int experts = 0;
  const float* alpha = nullptr;  ///< [E]
  Accumulate accumulate = Accumulate::kNo;
  const int32_t* flags = nullptr;  ///< one, or [E]

  CADRE_HD bool accumulates(int expert) const {
    if (accumulate == Accumulate::kDevice) return flags[0] != 0;
    if (accumulate == Accumulate::kPerExpert) return flags[expert] != 0;
    return accumulate == Accumulate::kYes;
  }
};

void ragged_contraction(Multiplicand as, const RaggedContractionArgs&, int blocks, cudaStream_t);

}  // namespace cadre::cuda::portable
