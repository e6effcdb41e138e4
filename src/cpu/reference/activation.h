#pragma once
#include "cadre/activation.h"

namespace cadre::cpu::reference {

/// Both directions element by element in double.
void activation(const ActivationPlan&, const ActivationArgs&, Workspace, Stream);

}  // namespace cadre::cpu::reference
