#pragma once
#include "activations/gradient.h"
#include "cadre/activation.h"
#include "cadre/host_device.h"

namespace cadre::activations {

/// An activation of one input, h = f(x), from a function that gives f(x) and f'(x).
template <class Function>
struct Pointwise {
  template <class Real>
  CADRE_HD static constexpr Real forward(Real x, Real, const ActivationConstants&) {
    return Function::at(x).value;
  }

  template <class Real>
  CADRE_HD static constexpr Gradient<Real> backward(Real x, Real, Real dh,
                                                    const ActivationConstants&) {
    const Slope<Real> f = Function::at(x);
    return {f.value, dh * f.slope, 0};
  }
};

/// A gated activation, h = f(gate) * up, from the same function.
template <class Function>
struct Gated {
  template <class Real>
  CADRE_HD static constexpr Real forward(Real gate, Real up, const ActivationConstants&) {
    return Function::at(gate).value * up;
  }

  template <class Real>
  CADRE_HD static constexpr Gradient<Real> backward(Real gate, Real up, Real dh,
                                                    const ActivationConstants&) {
    const Slope<Real> f = Function::at(gate);
    return {f.value * up, dh * up * f.slope, dh * f.value};
  }
};

}  // namespace cadre::activations
