#pragma once
#include <string>

#include "cadre/activation.h"

namespace cadre::cuda::portable {

/// An activation whose result is quantised along K, in one launch that reads z once, of bf16.
/// Bits are those of the activation and a quantise behind it.
void activation_codes(const ActivationPlan&, const ActivationArgs&, Workspace, Stream);
std::string refuses_activation_codes(const ActivationProblem&, const Device&);

}  // namespace cadre::cuda::portable
