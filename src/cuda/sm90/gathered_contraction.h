#pragma once
#include "cuda/sm90/ragged_contraction.h"

namespace cadre::cuda::sm90 {

/// What the kernel of wgrad is launched with where rows of an operand lie in the order of tokens.
/// That operand is a, and TMA does not read it.
struct GatheredContractionParams : RaggedContractionParams {
  const void* tokens = nullptr;      ///< [T, M]
  const uint32_t* places = nullptr;  ///< [R], see TokenPlaces
  const uint32_t* lacks = nullptr;   ///< [kPlaceBlocks]
};

/// Which instance: the type of all tensors, and whether rows of dw are columns of b.
struct GatheredContractionKind {
  DType type = DType::kBf16;
  bool transposed = false;
};

/// One instance, launched; instances/ has them, a file each.
template <GatheredContractionKind kKind>
void launch_gathered_contraction(const GatheredContractionParams&, int blocks, cudaStream_t);

/// The instance of that kind, of bf16 or f16.
using LaunchGatheredContraction = void (*)(const GatheredContractionParams&, int blocks,
                                           cudaStream_t);
LaunchGatheredContraction find_gathered_contraction(const GatheredContractionKind&);

}  // namespace cadre::cuda::sm90
