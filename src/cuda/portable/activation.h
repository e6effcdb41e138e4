#pragma once
#include "cadre/activation.h"

namespace cadre::cuda::portable {

/// Both directions in one launch. Elements have the bits of the CPU's `cpu`; dprob adds up the same
/// numbers in 256 sums, the CPU in 32.
void activation(const ActivationPlan&, const ActivationArgs&, Workspace, Stream);

}  // namespace cadre::cuda::portable
