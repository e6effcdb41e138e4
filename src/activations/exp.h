#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "cadre/host_device.h"
#include "formats/ieee.h"

namespace cadre::activations {

/// c0 + c1 x + c2 x^2 + ..., by Horner's rule. Without a loop, so that one around it vectorises.
template <class... More>
CADRE_HD constexpr float polynomial(float x, float c0, More... more) {
  if constexpr (sizeof...(more) == 0)
    return c0;
  else
    return formats::fma(polynomial(x, more...), x, c0);
}

/// What e^x is made of in fp32:
///
///   n = round(x / ln 2),  r = x - n ln 2 in two parts,  e^x = 2^n (1 + r + r^2 P(r))
///
/// P the polynomial of degree 4 for which the largest relative error over |r| <= 0.347 is least:
/// 2^-28. Each product is rounded together with the sum that it goes into.
struct ExpParts {
  float series;
  uint32_t shifted;  ///< bits of kRound + n, so n in the last of them

  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded

  CADRE_HD constexpr explicit ExpParts(float x) {
    constexpr float kLn2High = 355.0f / 512.0f, kLn2Low = -2.12194440e-4f;  // n * high is exact
    const float sum = formats::fma(x, 1.44269504f, kRound);
    const float n = sum - kRound;
    const float r = formats::fma(-n, kLn2Low, formats::fma(-n, kLn2High, x));
    series = polynomial(r, 1.0f, 1.0f, 0.49999994f, 0.166665196f, 0.0416684002f, 0.00836885069f,
                        0.00138143206f);
    shifted = std::bit_cast<uint32_t>(sum);
  }
};

/// e^x in fp32 without branches, so that a loop over it vectorises: below 2 ulp, 0 below -104,
/// infinity above 88.73, NaN stays NaN.
CADRE_HD constexpr float exp_of(float x) {
  const ExpParts parts(x < -105.0f ? -105.0f : x > 89.0f ? 89.0f : x);
  // 2^n in two factors, since n may lie outside the exponents of normal numbers.
  const int32_t exponent = int32_t(parts.shifted - std::bit_cast<uint32_t>(ExpParts::kRound));
  const int32_t half = exponent >> 1, rest = exponent - half;
  return parts.series * std::bit_cast<float>(uint32_t(half + 127) << 23) *
         std::bit_cast<float>(uint32_t(rest + 127) << 23);
}

/// The same bits for x <= 0, with less work: 2^(n + 64) is normal, and 2^-64 rounds once.
CADRE_HD constexpr float exp_of_negative(float x) {
  constexpr uint32_t kBias = 127 + 64 - std::bit_cast<uint32_t>(ExpParts::kRound);
  const ExpParts parts(x < -105.0f ? -105.0f : x);
  return parts.series * std::bit_cast<float>((parts.shifted << 23) + (kBias << 23)) *
         std::bit_cast<float>(uint32_t(127 - 64) << 23);
}

constexpr float kExpScale = 0x1p-30f;

/// A power of e as a product: the second factor is a power of two, and a sum with it needs no
/// rounding before.
template <class Real>
struct PowerOfE {
  Real series, two_to;

  CADRE_HD constexpr Real number() const { return series * two_to; }
  CADRE_HD constexpr Real plus(Real x) const { return formats::fma(series, two_to, x); }
};

/// 2^kExponent * e^-x, where that is a normal number.
template <int kExponent>
CADRE_HD constexpr PowerOfE<float> exp_of_minus(float x) {
  constexpr uint32_t kBias = uint32_t(127 + kExponent) - std::bit_cast<uint32_t>(ExpParts::kRound);
  const ExpParts parts(-x);
  return {parts.series, std::bit_cast<float>((parts.shifted << 23) + (kBias << 23))};
}

/// kExpScale * e^-x for x from -105 to 64, where it is a normal number, and beyond them that of the
/// bound; NaN stays NaN.
CADRE_HD constexpr PowerOfE<float> scaled_exp_of_minus(float x) {
  const float above = x < -105.0f ? -105.0f : x;
  return exp_of_minus<-30>(above > 64.0f ? 64.0f : above);
}

/// The same in double, for references.
CADRE_HD inline double exp_of(double x) { return std::exp(x); }
CADRE_HD inline double exp_of_negative(double x) { return std::exp(x); }
CADRE_HD inline PowerOfE<double> scaled_exp_of_minus(double x) {
  return {std::exp(x < -600 ? 600 : -x), kExpScale};
}

}  // namespace cadre::activations
