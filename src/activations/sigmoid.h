#pragma once
#include "activations/exp.h"
#include "formats/ieee.h"

namespace cadre::activations {

/// sigmoid(x) = 1 / (1 + e^-x) and what it lacks to 1, both with a small relative error at any x.
template <class Real>
struct Sigmoid {
  Real value, complement;

  CADRE_HD constexpr explicit Sigmoid(Real x) {
    const Real small = exp_of_negative(x < 0 ? x : -x);  // in [0, 1]: never overflows
    const Real large_part = formats::reciprocal(1 + small), small_part = small * large_part;
    value = x < 0 ? small_part : large_part;
    complement = x < 0 ? large_part : small_part;
  }
};

}  // namespace cadre::activations
