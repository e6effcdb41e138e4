#pragma once
#include "cadre/format.h"
#include "cadre/type_list.h"
#include "formats/bf16.h"
#include "formats/fp16.h"
#include "formats/fp32.h"
#include "formats/scale.h"

namespace cadre::formats {

template <class Stored>
inline constexpr FormatInfo kPlainInfo;
template <>
inline constexpr FormatInfo kPlainInfo<Fp32>{.kind = FormatKind::kF32,
                                             .name = "f32",
                                             .element = DType::kF32,
                                             .summary = "IEEE single precision, as is"};
template <>
inline constexpr FormatInfo kPlainInfo<Bf16>{.kind = FormatKind::kBf16,
                                             .name = "bf16",
                                             .element = DType::kBf16,
                                             .summary = "bfloat16, as is"};
template <>
inline constexpr FormatInfo kPlainInfo<Fp16>{.kind = FormatKind::kF16,
                                             .name = "f16",
                                             .element = DType::kF16,
                                             .summary = "IEEE half precision, as is"};

/// Stored values without scales; quantising to one is a cast.
template <class Stored>
struct Plain {
  using Elements = TypeList<Stored>;
  using Scale = NoScale;
  static constexpr bool kIsPlain = true;
  static constexpr FormatInfo kInfo = kPlainInfo<Stored>;

  template <class Element>
  CADRE_HD static constexpr ExpertScale expert_scale(float, const ScaleOptions&) {
    return {};
  }
  template <class Element>
  CADRE_HD static constexpr BlockScale<Scale::Code> block_scale(float, const ExpertScale&,
                                                                const ScaleOptions&) {
    return {};
  }
};

}  // namespace cadre::formats
