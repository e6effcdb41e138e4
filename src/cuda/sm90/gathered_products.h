#pragma once
#include "cuda/sm90/ragged_rows.h"
#include "cuda/sm90/token_order.h"

namespace cadre::cuda::sm90 {

/// What the kernel of fprop and dgrad from tokens is launched with; TMA does not read the batch.
struct GatheredProductsParams : RaggedRowsParams, TokenBatch {};

/// Which instance: how the weight lies, and the type of all tensors.
struct GatheredProductsKind {
  bool k_major = true;  ///< rows of w run along the contraction, else across it
  DType type = DType::kBf16;
};

/// One instance, launched; instances/ has them, a file each.
template <GatheredProductsKind kKind>
void launch_gathered_products(const GatheredProductsParams&, int blocks, cudaStream_t);

/// The instance of that kind, of bf16 or f16.
using LaunchGatheredProducts = void (*)(const GatheredProductsParams&, int blocks, cudaStream_t);
LaunchGatheredProducts find_gathered_products(const GatheredProductsKind&);

}  // namespace cadre::cuda::sm90
