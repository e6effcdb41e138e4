#pragma once
#include "activations/exp.h"
#include "activations/pointwise.h"

namespace cadre::activations {

/// x Phi(x) with Phi the normal distribution, by erfc: 1 + erf would lose the small values.
/// The derivative is Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi).
struct GeluFunction {
  template <class Real>
  CADRE_HD static constexpr Slope<Real> at(Real x) {
    constexpr Real kSqrtHalf = Real(0.70710678118654752440),
                   kDensity = Real(0.39894228040143267794);
    const Real phi = Real(0.5) * std::erfc(-x * kSqrtHalf);
    // Beyond 40 the density is 0 in double too; bounded, x * x does not become infinite.
    const Real bounded = x < -40 ? Real(-40) : x > 40 ? Real(40) : x;
    return {x * phi, phi + bounded * kDensity * exp_of(Real(-0.5) * bounded * bounded)};
  }
};

struct Gelu : Pointwise<GeluFunction> {
  static constexpr ActivationInfo kInfo{ActivationKind::kGelu, "gelu", false,
                                        "x * (1 + erf(x / sqrt(2))) / 2"};
};

}  // namespace cadre::activations
