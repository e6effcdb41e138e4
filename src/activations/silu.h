#pragma once
#include "activations/pointwise.h"
#include "activations/sigmoid.h"

namespace cadre::activations {

/// x sigmoid(x), also called swish.
struct SiluFunction {
  template <class Real>
  CADRE_HD static constexpr Slope<Real> at(Real x) {
    const Sigmoid<Real> s(x);
    return {x * s.value, formats::fma(x * s.value, s.complement, s.value)};
  }
};

struct Silu : Pointwise<SiluFunction> {
  static constexpr ActivationInfo kInfo{ActivationKind::kSilu, "silu", false, "x * sigmoid(x)"};
};

}  // namespace cadre::activations
