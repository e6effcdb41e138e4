#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cadre/grouped_gemm.h"
#include "cadre/host_device.h"
#include "cuda/sm90/tuning.h"

namespace cadre::cuda::sm90 {

constexpr int kGradientRows = 64;  // of dw, in one store

/// What the kernel of wgrad is launched with.
struct RaggedContractionParams {
  CUtensorMap a, b, dw;
  const CUtensorMap* experts = nullptr;  ///< [E] maps of dw in device memory; null: all in dw
  const int32_t* offsets = nullptr;
  unsigned long long* taken = nullptr;  ///< tiles, zero at first; null: tiles are dealt out
  int64_t rows = 0;
  int expert_count = 0, out_rows = 0, cols = 0;
  int band = kBand;              ///< see schedule::banded()
  const float* alpha = nullptr;  ///< [E]
  Accumulate accumulate = Accumulate::kNo;
  const int32_t* flags = nullptr;  ///< one word, or [E]

  CADRE_HD bool accumulates(int expert) const {
    if (accumulate == Accumulate::kDevice) return flags[0] != 0;
    if (accumulate == Accumulate::kPerExpert) return flags[expert] != 0;
    return accumulate == Accumulate::kYes;
  }
};

/// Which instance: the type of both operands, and that of the output.
struct RaggedContractionKind {
  DType in = DType::kBf16, out = DType::kBf16;

  bool operator==(const RaggedContractionKind&) const = default;
};

/// One instance, launched; instances/ has them, a file each.
template <RaggedContractionKind kKind>
void launch_ragged_contraction(const RaggedContractionParams&, int blocks, cudaStream_t);

/// The instance of that kind; null if none was built.
using LaunchRaggedContraction = void (*)(const RaggedContractionParams&, int blocks, cudaStream_t);
LaunchRaggedContraction find_ragged_contraction(const RaggedContractionKind&);

}  // namespace cadre::cuda::sm90
