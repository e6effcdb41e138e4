#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>

#include "cuda/check.h"

// How a kernel starts, and its shared memory.
namespace cadre::cuda {

struct Grid {
  dim3 blocks, threads;
  int shared_bytes = 0;  ///< dynamic_shared() of a block
  cudaStream_t stream = nullptr;
  int cluster = 1;           ///< the kernel's __cluster_dims__, which CUDA knows by itself
  bool cooperative = false;  ///< all blocks run at once, so that a grid_barrier() ends
  bool dependent = false;    ///< the kernel waits for its predecessors, see below
};

/// A dependent kernel may start while kernels before it in the stream run: waits until they are
/// over and all that they wrote is visible. Until then nothing in global memory may be read or
/// written.
__device__ inline void wait_for_predecessors() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next dependent kernel start where there is room, once all blocks of this one have come
/// here; that one's wait is for the end of this one, and so for all before it.
__device__ inline void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// Both, for a kernel of many short blocks: before anything in global memory.
__device__ inline void begin_dependent() {
  launch_dependents();
  wait_for_predecessors();
}

/// Whether kernels wait in every image of this build, of which a GPU takes one.
consteval bool all_images_wait() {
#ifdef __CUDA_ARCH_LIST__
  for (const int arch : {__CUDA_ARCH_LIST__})
    if (arch < 900) return false;
#endif
  return true;
}

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
  cudaLaunchAttribute attributes[2]{};
  config.attrs = attributes;
  if (grid.cooperative) {
    cudaLaunchAttribute& one = attributes[config.numAttrs++];
    one.id = cudaLaunchAttributeCooperative;
    one.val.cooperative = 1;
  }
  if (grid.dependent && all_images_wait()) {
    cudaLaunchAttribute& one = attributes[config.numAttrs++];
    one.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    one.val.programmaticStreamSerializationAllowed = 1;
  }
  check(cudaLaunchKernelEx(&config, kernel, args...), "launch a kernel");
}

/// What a block was launched with, aligned for TMA's swizzle.
__device__ inline uint8_t* dynamic_shared() {
  extern __shared__ __align__(1024) uint8_t memory[];
  return memory;
}

}  // namespace cadre::cuda
