#pragma once
#include "activations/relu.h"

namespace cadre::activations {

/// h = relu(gate) * up.
struct ReGlu : Gated<ReluFunction> {
  static constexpr ActivationInfo kInfo{ActivationKind::kReGlu, "reglu", true, "relu(gate) * up"};
};

}  // namespace cadre::activations
