#pragma once
#include <cstdint>

#include "cadre/dtype.h"
#include "cadre/host_device.h"

namespace cadre::cuda::portable {

/// What operands are multiplied as; fp32 where they differ.
enum class Multiplicand { kBf16, kF16, kF32 };

CADRE_HD constexpr int64_t element_bytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

/// One operand of all experts in device memory, as a tile sees it. Steps count bytes.
struct Operand {
  const void* data = nullptr;
  const void* const* discrete = nullptr;  ///< [E], instead of data
  DType dtype = DType::kF32;
  int64_t expert = 0;  ///< from expert to expert of data
  int64_t across = 0;  ///< from row to row of the tile, or from column to column
  int64_t deep = 0;    ///< along the contraction

  CADRE_HD const char* of(int e) const {
    if (discrete != nullptr) return static_cast<const char*>(discrete[e]);
    return static_cast<const char*>(data) + e * expert;
  }
};

/// An output of all experts, or what is added to it. Steps count bytes.
struct OutputMatrix {
  void* data = nullptr;
  void* const* discrete = nullptr;  ///< [E], instead of data
  DType dtype = DType::kF32;
  int64_t expert = 0;    ///< from expert to expert of data
  int64_t pitch = 0;     ///< from line to line
  bool columns = false;  ///< lines are columns

  CADRE_HD bool is_there() const { return data != nullptr || discrete != nullptr; }
  CADRE_HD char* of(int e) const {
    if (discrete != nullptr) return static_cast<char*>(discrete[e]);
    return static_cast<char*>(data) + e * expert;
  }
};

}  // namespace cadre::cuda::portable
