#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "cadre/host_device.h"

namespace cadre::activations {

/// e^x in fp32 without branches, so that a loop over it vectorises: below 2 ulp, 0 below -104,
/// infinity above 88.73, NaN stays NaN.
///
///   n = round(x / ln 2),  r = x - n ln 2 in two parts,  e^x = 2^n (1 + r + r^2/2! + ... + r^7/7!)
///
/// |r| <= 0.347, so the next term of the series is below 2^-27.
CADRE_HD constexpr float exp_of(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: what is added to it rounds to an integer
  constexpr float kLn2High = 355.0f / 512.0f, kLn2Low = -2.12194440e-4f;  // n * high is exact
  const float bounded = x < -105.0f ? -105.0f : x > 89.0f ? 89.0f : x;
  const float shifted = bounded * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (bounded - n * kLn2High) - n * kLn2Low;
  float series = 1.0f / 5040;
  series = series * r + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  // 2^n in two factors, since n may lie outside the exponents of normal numbers.
  const int32_t exponent = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRound);
  const int32_t half = exponent >> 1, rest = exponent - half;
  return series * std::bit_cast<float>(uint32_t(half + 127) << 23) *
         std::bit_cast<float>(uint32_t(rest + 127) << 23);
}

/// e^x in double, for references.
CADRE_HD inline double exp_of(double x) { return std::exp(x); }

}  // namespace cadre::activations
