#pragma once
#include "cadre/dtype.h"
#include "formats/ieee.h"

namespace cadre::formats {

/// bfloat16: the upper half of an fp32, with its exponents, subnormals and infinities and 8
/// significant bits. Rounds to nearest even, overflows to infinity; any NaN becomes 0x7fff.
struct Bf16 {
  using Code = uint16_t;
  static constexpr DType kDType = DType::kBf16;
  static constexpr float kLargest = float_of(0x7f7f'0000u);

  CADRE_HD static constexpr Code encode(float x) {
    const uint32_t bits = bits_of(x), odd = (bits >> 16) & 1u;
    const uint32_t rounded = (bits + 0x7fffu + odd) >> 16;
    return Code(is_nan(x) ? kNanBits >> 16 : rounded);
  }
  /// Rounds once, not by way of fp32's rounding to nearest.
  CADRE_HD static constexpr Code encode(double x) { return encode(round_to_odd(x)); }

  CADRE_HD static constexpr float decode(Code code) { return float_of(uint32_t(code) << 16); }

  /// True if bf16 holds x itself; a NaN counts, since it stays one.
  CADRE_HD static constexpr bool holds(double x) {
    return x != x || double(decode(encode(x))) == x;
  }
};

}  // namespace cadre::formats
