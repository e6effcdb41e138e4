#pragma once
#include "cuda/portable/activation_rows.cuh"
#include "cuda/portable/quantize_job.h"

// What the host tells the kernels of activations that write codes.
namespace cadre::cuda::portable {

struct ActivationCodesJob {
  ActivationJob act;
  QuantizeCopy copy;  ///< of h, or of dz, along K
};

/// Codes and scales in this format, of bf16. A format's instances have a source of
/// their own.
template <class Row, class Element>
void launch_activation_codes(const ActivationPlan&, const ActivationCodesJob&, cudaStream_t);

}  // namespace cadre::cuda::portable
