#pragma once
#include "formats/scale.h"

namespace cadre::formats {

/// Steps 3 to 5 below for a power of two, without a division: where the mantissa of amax is above
/// that of L, which has few bits, the difference borrows one from the exponents'. Neither rounding
/// nor a subnormal amax, whose quotient is infinite, changes that. For L from 4 on.
CADRE_HD constexpr float power_of_two_quotient(float amax, float largest, float if_infinite) {
  const uint32_t quotient = bits_of(largest) + bits_of(1.0f) - bits_of(amax);
  return float_of((quotient < kInfinityBits ? quotient : bits_of(if_infinite)) & kInfinityBits);
}

/// The fp32 multiplier of values with largest magnitude amax, for an element with the largest value
/// L. Codes are the saturated x * multiplier; the stored scale is 1 / multiplier.
///
///   1. amax = max(amax, eps), where NaN passes   2. 1 for an amax of 0, infinity or NaN
///   3. L / amax, an IEEE division   4. if that is infinite: `if_infinite`
///   5. for power-of-two scales the mantissa is cleared
CADRE_HD constexpr float fp32_multiplier(float amax, float largest, float if_infinite,
                                         const ScaleOptions& options) {
  const float bounded = amax < options.amax_eps ? options.amax_eps : amax;
  if (bounded == 0 || !is_finite(bounded)) return 1;
  if (options.power_of_two) return power_of_two_quotient(bounded, largest, if_infinite);
  const float quotient = div(largest, bounded);
  return is_finite(quotient) ? quotient : if_infinite;
}

/// The stored scale, 1 / multiplier. A power of two is never so small that its reciprocal is
/// infinite, and that of 2^127 is a subnormal number.
CADRE_HD constexpr float fp32_scale(float multiplier, const ScaleOptions& options) {
  if (!options.power_of_two) return div(1, multiplier);
  constexpr uint32_t kProduct = 254u << 23, kSubnormal = bits_of(pow2(-127));
  const uint32_t normal = kProduct - bits_of(multiplier);
  return float_of(normal > kSubnormal ? normal : kSubnormal);
}

}  // namespace cadre::formats
