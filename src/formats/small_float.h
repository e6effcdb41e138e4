#pragma once
#include "cadre/dtype.h"
#include "formats/ieee.h"

namespace cadre::formats {

/// The shape of a float of at most 8 bits: sign, exponent, mantissa from the top.
struct SmallFloatShape {
  DType dtype;
  int exponent_bits;
  int mantissa_bits;
  uint32_t largest;   ///< code of the largest finite value
  uint32_t infinity;  ///< code of infinity, or 0: none. Never written, since encoding saturates
  uint32_t nan;       ///< the code that NaN becomes; `largest` where there is none
};

/// A float of at most 8 bits with subnormals. Encoding saturates at the largest value, infinities
/// too, and rounds to nearest even. A NaN loses its sign; it becomes the code of all ones behind
/// the sign, as in NVIDIA's conversion instructions.
/// Source    OCP 8-bit Floating Point 1.0 (e4m3, e5m2), OCP Microscaling Formats 1.0 (e2m1)
template <SmallFloatShape kShape>
struct SmallFloat {
  using Code = uint8_t;
  static constexpr DType kDType = kShape.dtype;
  static constexpr int kExponentBits = kShape.exponent_bits, kMantissaBits = kShape.mantissa_bits;
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr int kMaxCode = (2 << (kExponentBits + kMantissaBits)) - 1;
  static constexpr int kDropped = 23 - kMantissaBits;  ///< bits of an fp32 mantissa not kept
  static constexpr float kSmallestNormal = pow2(1 - kBias);
  static constexpr float kSmallest = pow2(1 - kBias - kMantissaBits);  ///< step of the subnormals
  static constexpr bool kHasNan = kShape.nan != kShape.largest;
  static constexpr uint32_t kNanCode = kShape.nan;

  CADRE_HD static constexpr float decode(Code code) {
    const uint32_t m = code & (kSignBit - 1);
    const uint32_t subnormal = bits_of(mul(float(m), kSmallest));
    const uint32_t normal = (m << kDropped) + kRebias;
    const uint32_t special = kShape.infinity && m == kShape.infinity ? kInfinityBits : kNanBits;
    const uint32_t value = m < (1u << kMantissaBits) ? subnormal : normal;
    return float_of((code & kSignBit ? 0x8000'0000u : 0u) | (m > kShape.largest ? special : value));
  }

  static constexpr uint32_t kLargestCode = kShape.largest;
  static constexpr float kLargest =
      float_of((kShape.largest << kDropped) + (uint32_t(127 - kBias) << 23));

  CADRE_HD static constexpr Code encode(float x) { return Code(encode_word(x)); }

  /// The same in a 32-bit word: loops that narrow codes to bytes in a second step run faster.
  CADRE_HD static constexpr uint32_t encode_word(float x) {
    // A code counts steps: of its own binade, and all those of the binades from the lowest one up;
    // the subnormals share the lowest. Adding the float whose last bit is one step rounds to steps.
    const uint32_t m = saturated_magnitude(x), exponent = m & kInfinityBits;
    const uint32_t binade = exponent > kLowest ? exponent : kLowest;
    const uint32_t anchor = binade + (uint32_t(kDropped) << 23);
    const uint32_t steps = bits_of(add(float_of(m), float_of(anchor))) - anchor;
    return finish(x, steps + ((binade - kLowest) >> kDropped));
  }

  /// Rounds away from zero with the probability of the discarded fraction, toward zero otherwise.
  /// Of the 2^16 values of `random`, exactly n round away, where n / 2^16 is the multiple nearest
  /// to the fraction, the lower one of two; so a code is never left for another, and what lies at
  /// or beyond the largest value saturates.
  CADRE_HD static constexpr Code encode_stochastic(float x, uint32_t random) {
    return Code(encode_stochastic_word(x, random));
  }
  CADRE_HD static constexpr uint32_t encode_stochastic_word(float x, uint32_t random) {
    const uint32_t m = saturated_magnitude(x);
    const uint32_t exponent = m & kInfinityBits, binade = exponent > kLowest ? exponent : kLowest;
    // Times 2^(mantissa bits) / 2^exponent: exact, or so small that it rounds nowhere.
    const float steps = mul(float_of(m), float_of(((254u + kMantissaBits) << 23) - binade));
    const int below = int(steps);
    const float fraction = add(steps, -float(below));
    const float threshold = mul(add(float(int(random & 0xffffu)), 0.5f), pow2(-16));
    const uint32_t away = fraction > threshold ? 1u : 0u;
    return finish(x, uint32_t(below) + away + ((binade - kLowest) >> kDropped));
  }

 private:
  static constexpr uint32_t kSignBit = 1u << (kExponentBits + kMantissaBits);
  static constexpr uint32_t kRebias = uint32_t(127 - kBias) << 23;
  static constexpr uint32_t kLowest = uint32_t(128 - kBias) << 23;  ///< smallest normal, as fp32

  CADRE_HD static constexpr uint32_t saturated_magnitude(float x) {
    return magnitude(x) < bits_of(kLargest) ? magnitude(x) : bits_of(kLargest);
  }
  CADRE_HD static constexpr uint32_t finish(float x, uint32_t code) {
    // A mask instead of a choice: compilers would skip all the work above for a NaN, and then no
    // loop over this vectorises.
    const uint32_t sign = (bits_of(x) >> 31) * kSignBit, nan = 0u - uint32_t(is_nan(x));
    return ((sign | code) & ~nan) | (kShape.nan & nan);
  }
};

using E4m3 = SmallFloat<SmallFloatShape{DType::kE4m3, 4, 3, 0x7e, 0, 0x7f}>;     ///< up to 448
using E5m2 = SmallFloat<SmallFloatShape{DType::kE5m2, 5, 2, 0x7b, 0x7c, 0x7f}>;  ///< up to 57344
using E2m1 = SmallFloat<SmallFloatShape{DType::kE2m1, 2, 1, 0x7, 0, 0x7}>;       ///< up to 6

/// Two e2m1 codes share a byte, the element of even index in the low nibble.
CADRE_HD constexpr uint8_t pack_nibbles(uint8_t even, uint8_t odd) {
  return uint8_t((even & 0xfu) | (uint32_t(odd) << 4));
}
CADRE_HD constexpr uint8_t nibble(uint8_t byte, int64_t index) {
  return uint8_t(index & 1 ? byte >> 4 : byte & 0xfu);
}

}  // namespace cadre::formats
