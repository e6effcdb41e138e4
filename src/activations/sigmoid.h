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
    const Real one = kExpScale;
    const PowerOfE<Real> power = scaled_exp_of_minus(x);
    const Real inverse = formats::reciprocal(power.plus(one));
    value = one * inverse;
    complement = x > 64 ? Real(0) : power.number() * inverse;
  }
};

/// The same bits in fp32 for |x| <= kLargest, with less work: no power of e is infinite there.
struct SmallSigmoid {
  static constexpr float kLargest = 64;
  float value, complement;

  CADRE_HD constexpr explicit SmallSigmoid(float x) {
    const PowerOfE<float> power = exp_of_minus<0>(x);
    value = formats::reciprocal(power.plus(1.0f));
    complement = power.number() * value;
  }
};

}  // namespace cadre::activations
