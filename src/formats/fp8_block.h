#pragma once
#include "cadre/format.h"
#include "cadre/type_list.h"
#include "formats/fp32.h"
#include "formats/fp32_scale.h"
#include "formats/small_float.h"

namespace cadre::formats {

/// 8-bit codes in blocks of 128, or 128 x 128, with an fp32 scale each, by default a power of two.
struct Fp8Block {
  using Elements = TypeList<E4m3, E5m2>;
  using Scale = Fp32;
  static constexpr bool kIsPlain = false;
  static constexpr FormatInfo kInfo{
      .kind = FormatKind::kFp8Block,
      .name = "fp8_block",
      .element = DType::kE4m3,
      .takes_e5m2 = true,
      .block = 128,
      .scale = DType::kF32,
      .takes_square = true,
      .takes_power_of_two = true,
      .power_of_two_default = true,
      .summary = "8-bit codes, one fp32 scale per 128 codes",
  };

  template <class Element>
  CADRE_HD static constexpr ExpertScale expert_scale(float, const ScaleOptions&) {
    return {};
  }
  template <class Element>
  CADRE_HD static constexpr BlockScale<Scale::Code> block_scale(float amax, const ExpertScale&,
                                                                const ScaleOptions& options) {
    const float multiplier =
        fp32_multiplier(amax, Element::kLargest, options.largest_source, options);
    return {.code = fp32_scale(multiplier, options), .multiplier = multiplier};
  }
};

}  // namespace cadre::formats
