#pragma once
#include "activations/gelu_tanh.h"

namespace cadre::activations {

/// h = gelu_tanh(gate) * up.
struct GeGluTanh : Gated<GeluTanhFunction> {
  static constexpr ActivationInfo kInfo{ActivationKind::kGeGluTanh, "geglu_tanh", true,
                                        "gelu_tanh(gate) * up"};
};

}  // namespace cadre::activations
