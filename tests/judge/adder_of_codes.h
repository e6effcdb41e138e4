#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "formats/ieee.h"

namespace cadre::test {

constexpr int kCodesOfAnAdd = 32;

/// What Hopper's tensor cores make of 32 products of 8-bit codes and of what they are added to: all
/// addends are cut off at 13 bits of fraction below the largest of their exponents (a product's is
/// the sum of its factors'), and the sum at 13 bits below its own. `a` and `b` are values of codes.
///
/// Source    models of tensor cores that others fitted to measurements; an H200 has these bits.
inline float add_products_of_codes(const float* a, const float* b, float sum) {
  constexpr int kFraction = 13;
  const auto exponent = [](float x) { return int(formats::bits_of(x) >> 23 & 0xff) - 127; };
  float plain = sum;
  int largest = exponent(sum);  // -127 of zero
  for (int k = 0; k < kCodesOfAnAdd; ++k) {
    plain += a[k] * b[k];
    if (a[k] * b[k] != 0) largest = std::max(largest, exponent(a[k]) + exponent(b[k]));
  }
  if (!std::isfinite(plain) || largest == -127) return plain;
  const float up = formats::pow2(kFraction - largest);
  int units = int(sum * up);  // conversions cut off
  for (int k = 0; k < kCodesOfAnAdd; ++k) units += int(a[k] * b[k] * up);
  for (int unit = 2; unit < 1 << kFraction; unit *= 2)
    if (std::abs(units) >= unit << kFraction) units -= units % unit;
  return float(units) / up;
}

}  // namespace cadre::test
