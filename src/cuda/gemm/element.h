#pragma once
#include "cadre/dtype.h"

namespace cadre::cuda::gemm {

/// Bytes of one element, of types that a product takes or writes.
constexpr int element_bytes(DType dtype) {
  return dtype == DType::kF32 ? 4 : dtype == DType::kBf16 || dtype == DType::kF16 ? 2 : 1;
}

/// Bits of one, also of codes of four.
constexpr int element_bits(DType dtype) {
  return dtype == DType::kE2m1 ? 4 : 8 * element_bytes(dtype);
}

}  // namespace cadre::cuda::gemm
