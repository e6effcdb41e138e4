#pragma once
#include "activations/gelu.h"

namespace cadre::activations {

/// h = gelu(gate) * up.
struct GeGlu : Gated<GeluFunction> {
  static constexpr ActivationInfo kInfo{ActivationKind::kGeGlu, "geglu", true, "gelu(gate) * up"};
};

}  // namespace cadre::activations
