#pragma once
#include "activations/exp.h"
#include "formats/ieee.h"

namespace cadre::activations {

/// sigmoid(x) = 1 / (1 + e^-x) with a small relative error at any x, and what it lacks to 1, above
/// 64 zero: whoever multiplies it by x must not see that e^-64 is where powers end. Both parts of
/// the sum are scaled, so that no power of e is infinite.
template <class Real>
struct Sigmoid {
  Real value, complement;

  CADRE_HD constexpr explicit Sigmoid(Real x) {
    const Real one = kExpScale, power = scaled_exp_of_minus(x);
    const Real inverse = formats::reciprocal(one + power);
    value = one * inverse;
    complement = x > 64 ? Real(0) : power * inverse;
  }
};

}  // namespace cadre::activations
