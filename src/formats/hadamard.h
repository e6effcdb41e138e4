#pragma once
#include "formats/bf16.h"
#include "formats/ieee.h"

namespace cadre::formats {

/// The random Hadamard transform of 16 values: y = x * diag(signs) * H16 / 4, which is orthonormal,
/// so a product of two operands that are both transformed along its contraction is unchanged.
///
///   y[j] = bf16(0.25 * sum_i signs[i] * x[i] * (-1)^popcount(i & j))
///
/// The order of the fp32 additions is part of the format, since every device must give equal bits:
/// four rounds with distances 1, 2, 4 and 8; a round replaces each pair (v[i], v[i + distance]),
/// i without that bit, by (v[i] + v[i + distance], v[i] - v[i + distance]), each rounded once. Then
/// each value is multiplied by 0.25 and rounded to bf16.
struct Hadamard16 {
  static constexpr int kPoints = 16;
  /// Bit i is set where signs[i] is -1: + + + - + - - - - - - + - + - -.
  static constexpr uint32_t kNegative = 0b1101'0111'1110'1000;

  CADRE_HD static constexpr bool negative(int i) { return (kNegative >> i) & 1u; }

  /// Transforms 16 values in place. Every result is a bf16 number.
  CADRE_HD static constexpr void apply(float (&v)[kPoints]) {
    sign(v);
    add_pairs<kPoints>(v);
    for (int i = 0; i < kPoints; ++i) v[i] = finish(v[i]);
  }

  CADRE_HD static constexpr void sign(float (&v)[kPoints]) {
    for (int i = 0; i < kPoints; ++i) v[i] = negative(i) ? -v[i] : v[i];
  }
  /// The rounds with distances below kBelow.
  template <int kBelow, int kCount>
  CADRE_HD static constexpr void add_pairs(float (&v)[kCount]) {
    for (int distance = 1; distance < kBelow; distance *= 2)
      for (int i = 0; i < kCount; ++i) {
        if (i & distance) continue;
        const float a = v[i], b = v[i + distance];
        v[i] = add(a, b);
        v[i + distance] = add(a, -b);
      }
  }

  /// The last step of each value, a bf16 number.
  CADRE_HD static constexpr float finish(float sum) {
    return Bf16::decode(Bf16::encode(mul(sum, 0.25f)));
  }
};

}  // namespace cadre::formats
