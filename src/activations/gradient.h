#pragma once

namespace cadre::activations {

/// The value of a function of one number and its derivative there.
template <class Real>
struct Slope {
  Real value, slope;
};

/// What backward gives for one element: the activation itself, before the probability, and the
/// gradients of gate and up. Ungated activations leave `dup` zero.
template <class Real>
struct Gradient {
  Real value, dgate, dup;
};

}  // namespace cadre::activations
