#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/check.h"

// How a kernel starts, and its shared memory.
namespace cadre::cuda {

struct Grid {
  dim3 blocks, threads;
  int shared_bytes = 0;  ///< dynamic_shared() of a block
  cudaStream_t stream = nullptr;
  int cluster = 1;           ///< the kernel's __cluster_dims__, which CUDA knows by itself
  bool cooperative = false;  ///< all blocks run at once, so that a grid_barrier() ends
};

/// Throws DeviceError if the kernel cannot start; what happens later is the stream's.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), const Grid& grid, const Args&... args) {
  constexpr int kFreeBytes = 48 * 1024;  // what needs no attribute
  if (grid.shared_bytes > kFreeBytes)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               grid.shared_bytes),
          "set the shared memory of a kernel");
  cudaLaunchConfig_t config{};
  config.gridDim = grid.blocks;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = size_t(grid.shared_bytes);
  config.stream = grid.stream;
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  config.attrs = &cooperative;
  config.numAttrs = grid.cooperative ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, args...), "launch a kernel");
}

/// What a block was launched with, aligned for TMA's swizzle.
__device__ inline uint8_t* dynamic_shared() {
  extern __shared__ __align__(1024) uint8_t memory[];
  return memory;
}

}  // namespace cadre::cuda
