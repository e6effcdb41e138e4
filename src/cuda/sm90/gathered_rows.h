#pragma once
#include "cuda/sm90/gated_rows.h"

namespace cadre::cuda::sm90 {

constexpr int kGatheredPartFeatures = 16;  ///< columns of h and z in one box

/// What the kernel of gated fprop from tokens is launched with; x is not read by TMA.
struct GatheredRowsParams : GatedRowsParams {
  const void* tokens = nullptr;      ///< x [T, D]
  uint32_t token_units = 0;          ///< of sixteen bytes, from a token to the next
  const int32_t* slot_of = nullptr;  ///< [R], token * top_k + choice
  int top_k = 1, slots = 0;          ///< of a token, and T * top_k: what slot_of is below
};

/// One instance, launched; instances/ has them, a file each.
template <DType kType>
void launch_gathered_rows(const GatheredRowsParams&, int blocks, cudaStream_t);

/// The instance for operands and outputs of that type; null if none was built.
using LaunchGatheredRows = void (*)(const GatheredRowsParams&, int blocks, cudaStream_t);
LaunchGatheredRows find_gathered_rows(DType);

}  // namespace cadre::cuda::sm90
