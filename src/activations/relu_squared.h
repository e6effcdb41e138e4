#pragma once
#include "activations/pointwise.h"

namespace cadre::activations {

/// max(x, 0)^2. NaN stays NaN.
struct ReluSquaredFunction {
  template <class Real>
  CADRE_HD static constexpr Slope<Real> at(Real x) {
    const Real positive = x <= 0 ? Real(0) : x;
    return {positive * positive, 2 * positive};
  }
};

struct ReluSquared : Pointwise<ReluSquaredFunction> {
  static constexpr ActivationInfo kInfo{ActivationKind::kReluSquared, "relu_squared", false,
                                        "max(x, 0)^2"};
};

}  // namespace cadre::activations
