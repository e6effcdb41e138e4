#pragma once
#include "cadre/dtype.h"
#include "formats/ieee.h"

namespace cadre::formats {

/// IEEE single precision, stored as it is.
struct Fp32 {
  using Code = float;
  static constexpr DType kDType = DType::kF32;
  static constexpr float kLargest = kLargestFloat;

  CADRE_HD static constexpr Code encode(float x) { return x; }
  CADRE_HD static constexpr Code encode(double x) { return float(x); }
  CADRE_HD static constexpr float decode(Code code) { return code; }
};

}  // namespace cadre::formats
