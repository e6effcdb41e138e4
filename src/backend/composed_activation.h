#pragma once
#include <string>

#include "backend/entry.h"
#include "cadre/activation.h"

namespace cadre::backend {

/// An activation whose result is quantised along K as two operations, one after the other: what a
/// kernel that does both must equal bit for bit, and what there is where none runs. A result that
/// is not written plain lies in the workspace between them.
std::string refuses_composed_activation(const ActivationProblem&, const Device&);
int64_t composed_activation_workspace_bytes(const ActivationProblem&, const Device&);
Inner composed_activation_plans(const ActivationProblem&, const Device&);
void composed_activation(const ActivationPlan&, const ActivationArgs&, Workspace, Stream);

/// `refuses` of an implementation of activations alone.
template <std::string (*refuses)(const ActivationProblem&, const Device&)>
std::string plain_activation(const ActivationProblem& p, const Device& device) {
  return p.along_k ? "writes no codes" : refuses(p, device);
}

}  // namespace cadre::backend
