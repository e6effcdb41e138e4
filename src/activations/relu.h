#pragma once
#include "activations/pointwise.h"

namespace cadre::activations {

/// max(x, 0); its slope at 0 is 0. NaN stays NaN.
struct ReluFunction {
  template <class Real>
  CADRE_HD static constexpr Slope<Real> at(Real x) {
    return {x <= 0 ? Real(0) : x, x <= 0 ? Real(0) : Real(1)};
  }
};

struct Relu : Pointwise<ReluFunction> {
  static constexpr ActivationInfo kInfo{ActivationKind::kRelu, "relu", false, "max(x, 0)"};
};

}  // namespace cadre::activations
