#pragma once
#include "activations/silu.h"

namespace cadre::activations {

/// h = silu(gate) * up.
struct SwiGlu : Gated<SiluFunction> {
  static constexpr ActivationInfo kInfo{ActivationKind::kSwiGlu, "swiglu", true, "silu(gate) * up"};

  using Small = Gated<SmallSiluFunction>;
  static constexpr float small_gates(const ActivationConstants&) {
    return SmallSiluFunction::kLargest;
  }
};

}  // namespace cadre::activations
