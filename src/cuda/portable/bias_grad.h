#pragma once
#include "cadre/bias_grad.h"

namespace cadre::cuda::portable {

/// Both gradients in one launch. dbias_scale has the bits of the CPU's `cpu`; dbias adds up the
/// same numbers in 32 sums, the CPU in one.
void bias_grad(const BiasGradPlan&, const BiasGradArgs&, Workspace, Stream);

}  // namespace cadre::cuda::portable
