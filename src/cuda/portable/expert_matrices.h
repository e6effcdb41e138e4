#pragma once
#include <cstdint>

#include "cadre/dtype.h"
#include "cadre/tensor.h"
#include "cuda/device/chunk.h"

namespace cadre::cuda::portable {

/// The matrices of all experts; one for routed rows.
struct ExpertMatrices {
  Matrix first;
  int64_t pitch = 0;  ///< bytes from one to the next
  const void* const* discrete = nullptr;

  ExpertMatrices() = default;
  explicit ExpertMatrices(const TensorView& v, const void* const* pointers = nullptr)
      : discrete(pointers) {
    const int bytes = v.dtype == DType::kF32 ? 4 : 2;
    first.data = static_cast<char*>(v.data);
    first.dtype = v.dtype;
    first.columns = v.shape[v.rank - 1];
    first.pitch = v.stride[v.rank - 2] * bytes;
    pitch = v.rank == 3 ? v.stride[0] * bytes : 0;
  }
  __device__ Matrix of(int expert) const {
    Matrix m = first;
    if (discrete != nullptr)
      m.data = static_cast<char*>(const_cast<void*>(discrete[expert]));
    else if (m.data != nullptr)
      m.data += expert * pitch;
    return m;
  }
};

}  // namespace cadre::cuda::portable
