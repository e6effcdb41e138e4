#pragma once
#include "activations/gradient.h"
#include "activations/sigmoid.h"
#include "cadre/activation.h"

namespace cadre::activations {

/// g = min(gate, limit), u = clamp(up, -limit, limit) + offset, h = g * sigmoid(alpha * g) * u.
/// A value that was cut off has no gradient; one that equals the limit has. NaN stays NaN.
struct ClampedSwiGlu {
  static constexpr ActivationInfo kInfo{
      ActivationKind::kClampedSwiGlu, "clamped_swiglu", true,
      "g * sigmoid(alpha * g) * (u + offset), g = min(gate, limit), u = clamp(up, +-limit)"};

  template <class Real>
  CADRE_HD static constexpr Real forward(Real gate, Real up, const ActivationConstants& c) {
    const Real limit = c.limit, g = gate > limit ? limit : gate;
    const Real u = (up > limit ? limit : up < -limit ? -limit : up) + Real(c.offset);
    return g * Sigmoid<Real>(Real(c.alpha) * g).value * u;
  }

  template <class Real>
  CADRE_HD static constexpr Gradient<Real> backward(Real gate, Real up, Real dh,
                                                    const ActivationConstants& c) {
    const Real limit = c.limit, alpha = c.alpha, g = gate > limit ? limit : gate;
    const Real u = (up > limit ? limit : up < -limit ? -limit : up) + Real(c.offset);
    const Sigmoid<Real> s(alpha * g);
    const Real value = g * s.value, slope = formats::fma(alpha * value, s.complement, s.value);
    const bool cut_gate = gate > limit, cut_up = up > limit || up < -limit;
    return {value * u, cut_gate ? Real(0) : dh * u * slope, cut_up ? Real(0) : dh * value};
  }
};

}  // namespace cadre::activations
