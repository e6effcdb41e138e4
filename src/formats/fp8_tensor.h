#pragma once
#include "cadre/format.h"
#include "cadre/type_list.h"
#include "formats/fp32_scale.h"
#include "formats/small_float.h"

namespace cadre::formats {

/// 8-bit codes with one fp32 scale for all of an expert's codes.
struct Fp8Tensor {
  using Elements = TypeList<E4m3, E5m2>;
  using Scale = NoScale;
  static constexpr bool kIsPlain = false;
  static constexpr FormatInfo kInfo{
      .kind = FormatKind::kFp8Tensor,
      .name = "fp8_tensor",
      .element = DType::kE4m3,
      .takes_e5m2 = true,
      .scale = DType::kF32,
      .has_expert_scale = true,
      .takes_power_of_two = true,
      .summary = "8-bit codes, one fp32 scale per expert",
  };

  template <class Element>
  CADRE_HD static constexpr ExpertScale expert_scale(float amax, const ScaleOptions& options) {
    const float multiplier = fp32_multiplier(amax, Element::kLargest, kLargestFloat, options);
    return {.scale = div(1, multiplier), .encode = multiplier};
  }
  /// There are no blocks: every code has the expert's multiplier.
  template <class Element>
  CADRE_HD static constexpr BlockScale<Scale::Code> block_scale(float, const ExpertScale& expert,
                                                                const ScaleOptions&) {
    return {.code = {}, .multiplier = expert.encode};
  }
};

}  // namespace cadre::formats
