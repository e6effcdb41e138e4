#pragma once
#include "cadre/format.h"
#include "cadre/type_list.h"
#include "formats/scale.h"
#include "formats/small_float.h"

namespace cadre::formats {

/// e2m1 codes in blocks of 16, or 16 x 16, with an e4m3 scale each and one fp32 scale per expert.
///
///   A = amax of the expert    s = min(448 * 6 / A, FLT_MAX), 1 where A is 0, infinite or NaN
///   b = amax of the block     d = e4m3(min(b * (s * fl(1 / 6)), FLT_MAX)), the block's scale
///   code = e2m1(x * min(1 / (d * (1 / s)), FLT_MAX))      value = code * d * (1 / s)
///
/// Each operation is one fp32 rounding, in the order of the parentheses; 1 / s is the expert's
/// scale. With a NaN in it a block's scale is NaN, so all of it is; the other blocks are not.
/// Exact     A code times its block scale is a bf16 number, for all codes and scales.
struct Nvfp4 {
  using Elements = TypeList<E2m1>;
  using Scale = E4m3;
  static constexpr bool kIsPlain = false;
  static constexpr FormatInfo kInfo{
      .kind = FormatKind::kNvfp4,
      .name = "nvfp4",
      .element = DType::kE2m1,
      .block = 16,
      .scale = DType::kE4m3,
      .has_expert_scale = true,
      .takes_square = true,
      .takes_hadamard = true,
      .takes_stochastic = true,
      .summary = "e2m1 codes, one e4m3 scale per 16 codes and one fp32 scale per expert",
  };
  /// The largest code times the largest block scale: 6 * 448.
  static constexpr float kLargestProduct = E2m1::kLargest * E4m3::kLargest;

  template <class Element>
  CADRE_HD static constexpr ExpertScale expert_scale(float amax, const ScaleOptions&) {
    if (amax == 0 || !is_finite(amax)) return {};
    const float s = at_most_largest(div(kLargestProduct, amax));
    return {.scale = div(1, s), .encode = s};
  }

  template <class Element>
  CADRE_HD static constexpr BlockScale<Scale::Code> block_scale(float amax,
                                                                const ExpertScale& expert,
                                                                const ScaleOptions&) {
    const Scale::Code d = E4m3::encode(number_of_scale<Element>(amax, expert));
    return {.code = d, .multiplier = multiplier(E4m3::decode(d), expert)};
  }

  /// What becomes d, and what becomes of it, for who encodes it by an instruction.
  template <class Element>
  CADRE_HD static constexpr float number_of_scale(float amax, const ExpertScale& expert) {
    constexpr float kSixth = 1.0f / Element::kLargest;
    return mul(amax, mul(expert.encode, kSixth));
  }
  CADRE_HD static constexpr float multiplier(float d, const ExpertScale& expert) {
    return inverse(mul(d, expert.scale));
  }

 private:
  /// 1 / x, for which most x need no division; the largest number for 0.
  CADRE_HD static constexpr float inverse(float x) {
    if (x >= pow2(-100) && x <= pow2(100)) return reciprocal(x);
    return x == 0 ? kLargestFloat : at_most_largest(div(1, x));
  }
  CADRE_HD static constexpr float at_most_largest(float x) {
    return x > kLargestFloat ? kLargestFloat : x;
  }
};

}  // namespace cadre::formats
