#pragma once
#include <cmath>

#include "activations/gradient.h"
#include "activations/sigmoid.h"
#include "cadre/activation.h"

namespace cadre::activations {

/// g = min(gate, limit), u = clamp(up, -limit, limit) + offset, h = g * sigmoid(alpha * g) * u.
/// A value that was cut off has no gradient; one that equals the limit has. NaN stays NaN.
template <class OfGate>
struct ClampedGlu {
  template <class Real>
  CADRE_HD static constexpr Real forward(Real gate, Real up, const ActivationConstants& c) {
    const Real limit = c.limit, g = formats::at_most(gate, limit);
    const Real u = formats::at_least(formats::at_most(up, limit), -limit) + Real(c.offset);
    return g * OfGate::sigmoid(Real(c.alpha) * g).value * u;
  }

  template <class Real>
  CADRE_HD static constexpr Gradient<Real> backward(Real gate, Real up, Real dh,
                                                    const ActivationConstants& c) {
    const Real limit = c.limit, alpha = c.alpha, g = formats::at_most(gate, limit);
    const Real u = formats::at_least(formats::at_most(up, limit), -limit) + Real(c.offset);
    const auto s = OfGate::sigmoid(alpha * g);
    const Real value = g * s.value, slope = formats::fma(alpha * value, s.complement, s.value);
    const bool cut_gate = gate > limit, cut_up = std::abs(up) > limit;
    return {value * u, cut_gate ? Real(0) : dh * u * slope, cut_up ? Real(0) : dh * value};
  }
};

struct AnyGates {
  template <class Real>
  CADRE_HD static constexpr Sigmoid<Real> sigmoid(Real x) {
    return Sigmoid<Real>(x);
  }
};
struct SmallGates {
  CADRE_HD static constexpr SmallSigmoid sigmoid(float x) { return SmallSigmoid(x); }
};

struct ClampedSwiGlu : ClampedGlu<AnyGates> {
  static constexpr ActivationInfo kInfo{
      ActivationKind::kClampedSwiGlu, "clamped_swiglu", true,
      "g * sigmoid(alpha * g) * (u + offset), g = min(gate, limit), u = clamp(up, +-limit)"};

  using Small = ClampedGlu<SmallGates>;
  /// So much below kLargest / alpha that no rounding matters; finite for the smallest alpha.
  static constexpr float small_gates(const ActivationConstants& c) {
    const float alpha = c.alpha < 0 ? -c.alpha : c.alpha, most = SmallSigmoid::kLargest - 1;
    return alpha < 1e-20f ? most : most / alpha;
  }
};

}  // namespace cadre::activations
