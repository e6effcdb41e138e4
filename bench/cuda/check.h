#pragma once
#include <cuda_runtime_api.h>

#include <string_view>

#include "cadre/error.h"

namespace cadre::bench {

/// Throws DeviceError unless `code` is success. `what` says what was tried.
inline void check_cuda(cudaError_t code, std::string_view what) {
  if (code != cudaSuccess)
    throw DeviceError(
        text("bench: cannot ", what, ": ", cudaGetErrorName(code), ", ", cudaGetErrorString(code)));
}

}  // namespace cadre::bench
