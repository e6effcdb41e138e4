#pragma once
#include "cadre/bias_grad.h"

namespace cadre::cpu {

/// dbias by expert and block of columns, dbias_scale by row, in parallel.
void bias_grad(const BiasGradPlan&, const BiasGradArgs&, Workspace, Stream);

}  // namespace cadre::cpu
