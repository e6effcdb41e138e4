#pragma once
#include <cuda_runtime_api.h>

#include <string_view>

#include "cadre/error.h"

namespace cadre::cuda {

/// Throws DeviceError with the code's name and text unless `code` is success.
/// `what` says what was tried, such as "count the CUDA devices".
inline void check(cudaError_t code, std::string_view what) {
  if (code != cudaSuccess)
    throw DeviceError(
        text("cuda: cannot ", what, ": ", cudaGetErrorName(code), ", ", cudaGetErrorString(code)));
}

/// True for the codes with which the runtime says that there is no driver, or no device.
inline bool means_no_device(cudaError_t code) {
  return code == cudaErrorNoDevice || code == cudaErrorInsufficientDriver ||
         code == cudaErrorStubLibrary;
}

}  // namespace cadre::cuda
