#pragma once
#include "cadre/activation.h"

namespace cadre::cpu {

/// Both directions, row by row in parallel, 32 features at a time in fp32.
void activation(const ActivationPlan&, const ActivationArgs&, Workspace, Stream);

}  // namespace cadre::cpu
