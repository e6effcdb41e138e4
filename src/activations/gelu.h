#pragma once
#include "activations/normal.h"
#include "activations/pointwise.h"

namespace cadre::activations {

/// x Phi(x) with Phi the normal distribution; the derivative is Phi(x) + x phi(x).
struct GeluFunction {
  template <class Real>
  CADRE_HD static constexpr Slope<Real> at(Real x) {
    const Normal<Real> n = normal(x);
    // Beyond 40 the density is 0; bounded, infinity times it does not become NaN.
    const Real bounded = x < -40 ? Real(-40) : x > 40 ? Real(40) : x;
    return {x * n.below, formats::fma(bounded, n.density, n.below)};
  }
};

struct Gelu : Pointwise<GeluFunction> {
  static constexpr ActivationInfo kInfo{ActivationKind::kGelu, "gelu", false,
                                        "x * (1 + erf(x / sqrt(2))) / 2"};
};

}  // namespace cadre::activations
