#pragma once
#include "cadre/dtype.h"
#include "formats/ieee.h"

namespace cadre::formats {

/// A power of two in eight bits: code 0..254 is 2^(code - 127), 255 is NaN. No zero, no sign.
/// Source    OCP Microscaling Formats 1.0.
struct E8m0 {
  using Code = uint8_t;
  static constexpr DType kDType = DType::kE8m0;
  static constexpr Code kLargestCode = 254, kNanCode = 255;

  /// Code 0 is an fp32 subnormal, 2^-127.
  CADRE_HD static constexpr float decode(Code code) {
    const uint32_t value = code ? uint32_t(code) << 23 : 0x40'0000u;
    return float_of(code == kNanCode ? kNanBits : value);
  }

  /// 1 / decode(code): 2^(127 - code), NaN for NaN.
  CADRE_HD static constexpr float reciprocal(Code code) {
    const uint32_t value = code < 254 ? (254u - code) << 23 : 0x40'0000u;
    return float_of(code == kNanCode ? kNanBits : value);
  }

  /// The smallest power of two not below v, for v >= 0, between 2^-127 and 2^127; zero becomes
  /// 2^-127, infinity 2^127.
  CADRE_HD static constexpr Code encode_up(float v) {
    const uint32_t m = magnitude(v);
    // A subnormal up to 2^-127 is covered by code 0; a larger one needs 2^-126, code 1.
    return limited(m, m <= 0x40'0000u ? 0u : (m + kMantissaBits) >> 23);
  }

  /// The OCP rule: the largest power of two not above amax, divided by 2^largest_exponent, that of
  /// the element's largest value. The largest elements of a block may then saturate.
  CADRE_HD static constexpr Code encode_floor(float amax, int largest_exponent) {
    const uint32_t m = magnitude(amax), exponent = m >> 23, by = uint32_t(largest_exponent);
    return limited(m, m == kInfinityBits ? kLargestCode : exponent > by ? exponent - by : 0u);
  }

 private:
  CADRE_HD static constexpr Code limited(uint32_t m, uint32_t code) {
    const uint32_t largest = kLargestCode;
    return Code(m > kInfinityBits ? uint32_t(kNanCode) : code < largest ? code : largest);
  }
};

/// The exponent of a normal number: 2^n <= |x| < 2^(n + 1).
CADRE_HD constexpr int exponent_of(float x) { return int(magnitude(x) >> 23) - 127; }

/// The e8m0 scale of a block with largest magnitude amax: `up` = amax / largest of the element,
/// rounded up to a power of two, so that no element saturates; or the OCP floor rule.
template <class Element>
CADRE_HD constexpr E8m0::Code e8m0_scale(float amax, bool floor) {
  constexpr float kReciprocal = 1.0f / Element::kLargest;
  return floor ? E8m0::encode_floor(amax, exponent_of(Element::kLargest))
               : E8m0::encode_up(mul(amax, kReciprocal));
}

}  // namespace cadre::formats
