#pragma once
#include "cuda/sm90/gated_rows.h"
#include "cuda/sm90/token_order.h"

namespace cadre::cuda::sm90 {

constexpr int kGatheredPartFeatures = 16;  ///< columns of h and z in one box

/// What the kernel of gated fprop from tokens is launched with; x is not read by TMA.
struct GatheredRowsParams : GatedRowsParams, TokenBatch {};

/// One instance, launched; instances/ has them, a file each.
template <DType kType>
void launch_gathered_rows(const GatheredRowsParams&, int blocks, cudaStream_t);

/// The instance for operands and outputs of that type; null if none was built.
using LaunchGatheredRows = void (*)(const GatheredRowsParams&, int blocks, cudaStream_t);
LaunchGatheredRows find_gathered_rows(DType);

}  // namespace cadre::cuda::sm90
