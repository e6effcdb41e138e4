#pragma once
#include "activations/pointwise.h"
#include "activations/sigmoid.h"

namespace cadre::activations {

/// The approximation of gelu by tanh. Since (1 + tanh(u)) / 2 = sigmoid(2 u), it is x sigmoid(2 u)
/// with u = sqrt(2 / pi) (x + 0.044715 x^3), and its derivative
/// s + x s (1 - s) 2 sqrt(2 / pi) (1 + 3 * 0.044715 x^2).
struct GeluTanhFunction {
  template <class Real>
  CADRE_HD static constexpr Slope<Real> at(Real x) {
    constexpr Real kTwice = Real(1.5957691216057307117), kCubic = Real(0.044715);
    // Beyond 32 the sigmoid is 0 or 1 in double too; bounded, its argument does not overflow.
    const Real bounded = x < -32 ? Real(-32) : x > 32 ? Real(32) : x;
    const Real square = bounded * bounded;
    const Sigmoid<Real> s(kTwice * bounded * formats::fma(kCubic, square, Real(1)));
    const Real inner = kTwice * formats::fma(3 * kCubic, square, Real(1));
    return {x * s.value, formats::fma(bounded * s.value, s.complement * inner, s.value)};
  }
};

struct GeluTanh : Pointwise<GeluTanhFunction> {
  static constexpr ActivationInfo kInfo{ActivationKind::kGeluTanh, "gelu_tanh", false,
                                        "x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2"};
};

}  // namespace cadre::activations
