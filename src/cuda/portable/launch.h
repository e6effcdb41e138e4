#pragma once
#include <cuda_runtime_api.h>

#include <string>

#include "cadre/device.h"
#include "cadre/error.h"
#include "cadre/stream.h"
#include "cuda/device/launch.h"

// What the launchers of the portable kernels share.
namespace cadre::cuda::portable {

constexpr int kLanes = 32;  // threads of a warp

/// For `refuses`: the kernels are written for sm_80 and later, and take every problem there.
template <class Problem>
std::string needs_sm80(const Problem&, const Device& device) {
  return device.sm >= 80 ? std::string() : text("needs sm_80 or later, has sm_", device.sm);
}

inline cudaStream_t stream_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

}  // namespace cadre::cuda::portable
