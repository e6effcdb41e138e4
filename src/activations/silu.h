#pragma once
#include "activations/pointwise.h"
#include "activations/sigmoid.h"

namespace cadre::activations {

/// x sigmoid(x), also called swish.
struct SiluFunction {
  template <class Real>
  CADRE_HD static constexpr Slope<Real> at(Real x) {
    return of(x, Sigmoid<Real>(x));
  }
  template <class Real, class OfX>
  CADRE_HD static constexpr Slope<Real> of(Real x, const OfX& s) {
    return {x * s.value, formats::fma(x * s.value, s.complement, s.value)};
  }
};

/// The same bits for |x| <= kLargest.
struct SmallSiluFunction {
  static constexpr float kLargest = SmallSigmoid::kLargest;

  CADRE_HD static constexpr Slope<float> at(float x) {
    return SiluFunction::of(x, SmallSigmoid(x));
  }
};

struct Silu : Pointwise<SiluFunction> {
  static constexpr ActivationInfo kInfo{ActivationKind::kSilu, "silu", false, "x * sigmoid(x)"};

  using Small = Pointwise<SmallSiluFunction>;
  static constexpr float small_gates(const ActivationConstants&) {
    return SmallSiluFunction::kLargest;
  }
};

}  // namespace cadre::activations
