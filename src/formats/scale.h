#pragma once
#include "cadre/format.h"
#include "formats/ieee.h"

namespace cadre::formats {

/// What the scale rules depend on beside an amax.
struct ScaleOptions {
  bool power_of_two = false;             ///< fp32 scales: clear the mantissa
  bool floor = false;                    ///< e8m0 scales: the OCP rule
  float amax_eps = 0;                    ///< fp32 scales: lower bound of an amax
  float largest_source = kLargestFloat;  ///< largest finite value of the type that is quantised
};

/// The options of a format, for values of a type with that largest finite value.
CADRE_HD constexpr ScaleOptions scale_options(const Format& format, float amax_eps,
                                              float largest_source) {
  return {format.power_of_two, format.floor_scale, amax_eps, largest_source};
}

/// What the amax of a whole expert becomes: the scale that is stored, and its counterpart that
/// encoding multiplies by.
struct ExpertScale {
  float scale = 1;
  float encode = 1;
};

/// What the amax of a block becomes: the code of the stored scale, and what x is multiplied by
/// before it becomes a code.
template <class Code>
struct BlockScale {
  Code code{};
  float multiplier = 1;
};

/// For formats without block scales.
struct NoScale {
  using Code = uint8_t;
  static constexpr DType kDType = DType::kF32;
  CADRE_HD static constexpr float decode(Code) { return 1; }
};

}  // namespace cadre::formats
