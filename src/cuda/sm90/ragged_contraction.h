#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cadre/grouped_gemm.h"
#include "cuda/sm90/plain.h"
#include "cuda/sm90/tuning.h"

namespace cadre::cuda::sm90 {

constexpr int kGradientRows = 64;  // of dw, in one store
/// Of an operand, in one load.
constexpr int contraction_depth(bool floats) { return floats ? kDepth : kDepthOfGradients; }

/// Maps for the copy engine. With `experts`, an array in device memory, each expert has its own
/// map of its dw.
struct RaggedContractionMaps {
  CUtensorMap a, b, dw;
  const CUtensorMap* experts = nullptr;
};

struct RaggedContractionArgs {
  const int32_t* offsets;
  unsigned long long* taken;  ///< tiles, zero at first; or null
  int64_t rows;
  int experts, out_rows, cols;
  int band = kBand;              ///< see schedule::banded()
  const float* alpha = nullptr;  ///< [E]
  Plain dw{};                    ///< [E, N, K]
  int64_t dw_step = 0;           ///< from row to row of dw, in elements
  Accumulate accumulate = Accumulate::kNo;
  const int32_t* flags = nullptr;  ///< one word, or [E]

  CADRE_HD bool accumulates(int expert) const {
    if (accumulate == Accumulate::kDevice) return flags[0] != 0;
    if (accumulate == Accumulate::kPerExpert) return flags[expert] != 0;
    return accumulate == Accumulate::kYes;
  }
  /// Whether sums are more than stored; the copy engine adds floats.
  CADRE_HD bool has_epilogue(bool floats) const {
    return alpha != nullptr || (!floats && accumulate != Accumulate::kNo);
  }
};

/// Which kernel: the types.
struct RaggedContractionKind {
  bool f16 = false;  ///< operands, else bf16
  bool floats = false;
};

void ragged_contraction(const RaggedContractionKind&, const RaggedContractionMaps&,
                        const RaggedContractionArgs&, int blocks, cudaStream_t);

}  // namespace cadre::cuda::sm90
