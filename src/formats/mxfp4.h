#pragma once
#include "cadre/format.h"
#include "cadre/type_list.h"
#include "formats/e8m0.h"
#include "formats/scale.h"
#include "formats/small_float.h"

namespace cadre::formats {

/// e2m1 codes in blocks of 32 with an e8m0 scale each.
/// Exact     A code times its scale is a bf16 number for all codes if the scale's code is 252 or
///           less; beyond, some products overflow.
/// Source    OCP Microscaling Formats 1.0.
struct Mxfp4 {
  using Elements = TypeList<E2m1>;
  using Scale = E8m0;
  static constexpr bool kIsPlain = false;
  static constexpr FormatInfo kInfo{
      .kind = FormatKind::kMxfp4,
      .name = "mxfp4",
      .element = DType::kE2m1,
      .block = 32,
      .scale = DType::kE8m0,
      .takes_floor = true,
      .summary = "e2m1 codes, one power-of-two scale per 32 codes; for weights",
  };

  template <class Element>
  CADRE_HD static constexpr ExpertScale expert_scale(float, const ScaleOptions&) {
    return {};
  }
  template <class Element>
  CADRE_HD static constexpr BlockScale<Scale::Code> block_scale(float amax, const ExpertScale&,
                                                                const ScaleOptions& options) {
    const E8m0::Code code = e8m0_scale<Element>(amax, options.floor);
    return {.code = code, .multiplier = E8m0::reciprocal(code)};
  }
};

}  // namespace cadre::formats
