#pragma once
#include <cstdint>

#include "cadre/dtype.h"
#include "cadre/host_device.h"

namespace cadre::cuda::portable {

/// What operands are multiplied as; fp32 where they differ.
enum class Multiplicand { kBf16, kF16, kF32 };

CADRE_HD constexpr int64_t element_bytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

/// One operand of all experts in device memory. Strides are in bytes.
struct Operand {
  const void* data = nullptr;
  const void* const* discrete = nullptr;  ///< [E], instead of data
  DType dtype = DType::kF32;
  int64_t expert = 0;  ///< stride of the experts in data
  int64_t across = 0;  ///< stride of the tile's rows, or of its columns
  int64_t deep = 0;    ///< stride along the contraction

  CADRE_HD const char* of(int e) const {
    if (discrete != nullptr) return static_cast<const char*>(discrete[e]);
    return static_cast<const char*>(data) + e * expert;
  }
};

/// An output of all experts, or what is added to it. Strides are in bytes.
struct OutputMatrix {
  void* data = nullptr;
  void* const* discrete = nullptr;  ///< [E], instead of data
  DType dtype = DType::kF32;
  int64_t expert = 0;    ///< stride of the experts in data
  int64_t pitch = 0;     ///< stride of the lines
  bool columns = false;  ///< lines are columns

  CADRE_HD bool is_there() const { return data != nullptr || discrete != nullptr; }
  CADRE_HD char* of(int e) const {
    if (discrete != nullptr) return static_cast<char*>(discrete[e]);
    return static_cast<char*>(data) + e * expert;
  }
};

}  // namespace cadre::cuda::portable
