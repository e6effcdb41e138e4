#pragma once
#include "activations/silu.h"

namespace cadre::activations {

/// h = silu(gate) * up.
struct SwiGlu : Gated<SiluFunction> {
  static constexpr ActivationInfo kInfo{ActivationKind::kSwiGlu, "swiglu", true, "silu(gate) * up"};
};

}  // namespace cadre::activations
