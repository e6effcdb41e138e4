#pragma once
#include "cadre/dtype.h"
#include "formats/ieee.h"

namespace cadre::formats {

/// IEEE half precision: 11 significant bits, largest 65504, subnormals down to 2^-24. Rounds to
/// nearest even, overflows to infinity; any NaN becomes 0x7fff.
struct Fp16 {
  using Code = uint16_t;
  static constexpr DType kDType = DType::kF16;
  static constexpr float kLargest = 65504.0f;

  CADRE_HD static constexpr Code encode(float x) {
    const uint32_t sign = (bits_of(x) >> 16) & 0x8000u, m = magnitude(x);
    // Below 2^-14 the step is 2^-24 throughout: an addition to 0.5, whose step that is, rounds.
    const uint32_t subnormal = bits_of(add(float_of(m), 0.5f)) - bits_of(0.5f);
    const uint32_t normal = (m - (112u << 23) + 0xfffu + ((m >> 13) & 1u)) >> 13;
    const uint32_t finite = m < bits_of(pow2(-14)) ? subnormal : normal;
    // 65520 lies halfway between the largest and what would follow, and goes up.
    const uint32_t code = m < bits_of(65520.0f) ? finite : 0x7c00u;
    return Code(is_nan(x) ? kNanBits >> 16 : sign | code);
  }
  /// Rounds once, not by way of fp32's rounding to nearest.
  CADRE_HD static constexpr Code encode(double x) { return encode(round_to_odd(x)); }

  CADRE_HD static constexpr float decode(Code code) {
    const uint32_t sign = uint32_t(code & 0x8000u) << 16, m = code & 0x7fffu;
    const uint32_t subnormal = bits_of(mul(float(m), pow2(-24)));
    const uint32_t normal = (m << 13) + (112u << 23);
    const uint32_t special = (m << 13) | kInfinityBits;
    return float_of(sign | (m < 0x400u ? subnormal : m < 0x7c00u ? normal : special));
  }
};

}  // namespace cadre::formats
