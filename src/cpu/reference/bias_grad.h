#pragma once
#include "cadre/bias_grad.h"

namespace cadre::cpu::reference {

/// Both gradients by their formulas, summed in double.
void bias_grad(const BiasGradPlan&, const BiasGradArgs&, Workspace, Stream);

}  // namespace cadre::cpu::reference
