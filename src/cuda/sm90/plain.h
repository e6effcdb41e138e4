#pragma once
#include <cstdint>

#include "cadre/dtype.h"
#include "cadre/host_device.h"

namespace cadre::cuda::sm90 {

/// Numbers of a plain type, one part an expert: `step` elements apart, or at E pointers.
struct Plain {
  const void* data = nullptr;
  const void* const* discrete = nullptr;
  DType dtype = DType::kF32;
  int64_t step = 0;

  CADRE_HD bool is_there() const { return data != nullptr || discrete != nullptr; }
};

}  // namespace cadre::cuda::sm90
