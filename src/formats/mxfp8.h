#pragma once
#include "cadre/format.h"
#include "cadre/type_list.h"
#include "formats/e8m0.h"
#include "formats/scale.h"
#include "formats/small_float.h"

namespace cadre::formats {

/// 8-bit codes in blocks of 32, or 32 x 32, with an e8m0 scale each.
/// Exact     A code times its scale is a bf16 number for all codes if the scale's code is 3 to 246
///           (e4m3) or 10 to 239 (e5m2). Outside, the product may lie below bf16's smallest step
///           or beyond its largest value; it is then rounded once, to nearest even.
/// Source    OCP Microscaling Formats 1.0.
struct Mxfp8 {
  using Elements = TypeList<E4m3, E5m2>;
  using Scale = E8m0;
  static constexpr bool kIsPlain = false;
  static constexpr FormatInfo kInfo{
      .kind = FormatKind::kMxfp8,
      .name = "mxfp8",
      .element = DType::kE4m3,
      .takes_e5m2 = true,
      .block = 32,
      .scale = DType::kE8m0,
      .takes_square = true,
      .takes_floor = true,
      .summary = "8-bit codes, one power-of-two scale per 32 codes",
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
