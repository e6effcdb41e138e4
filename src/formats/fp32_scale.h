#pragma once
#include "formats/scale.h"

namespace cadre::formats {

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
  const float quotient = div(largest, bounded);
  const uint32_t bits = bits_of(is_finite(quotient) ? quotient : if_infinite);
  return float_of(options.power_of_two ? bits & kInfinityBits : bits);
}

}  // namespace cadre::formats
