#pragma once
#include "formats/ieee.h"

namespace cadre::formats {

/// a / b, rounded once, for one b of 1 to 2^16 and many a: 0, or kLeastDividend to 1, so that a
/// remainder is as exact as at any size. A division of the device would branch for each of them.
/// The product with the rounded reciprocal is within 1.5 units in the last place. What is left once
/// its remainder is added, 3.5 / 2^24 of one, can matter only where a quotient is that near to a
/// midpoint of two numbers. For each b there are a few such a; divisor_test tries them.
struct Divisor {
  static constexpr float kLeastDividend = 0x1p-90f;
  float b, reciprocal_of_b;

  CADRE_HD constexpr explicit Divisor(float divisor)
      : b(divisor), reciprocal_of_b(reciprocal(divisor)) {}

  CADRE_HD constexpr float quotient(float a) const {
    const float near = mul(a, reciprocal_of_b);
    return fma(fma(-b, near, a), reciprocal_of_b, near);
  }
};

}  // namespace cadre::formats
