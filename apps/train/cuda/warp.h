#pragma once
#include <cstdint>

#include "cuda/device/launch.h"

// What the kernels of the dense operations share. Blocks have kThreads threads.
namespace cadre::train::cuda {

constexpr int kThreads = 256;
constexpr int kLanes = 32;
constexpr int64_t kMostBlocks = 1 << 16;  // of a grid-stride loop

/// So many threads or more, in blocks.
inline cadre::cuda::Grid grid_of(int64_t threads, cudaStream_t stream) {
  const int64_t blocks = (threads + kThreads - 1) / kThreads;
  return {dim3(unsigned(blocks)), dim3(kThreads), 0, stream};
}

/// A grid for `for_elements`.
inline cadre::cuda::Grid grid_of_elements(int64_t count, cudaStream_t stream) {
  return grid_of(count < kMostBlocks * kThreads ? count : kMostBlocks * kThreads, stream);
}

__device__ inline int64_t thread_index() { return int64_t(blockIdx.x) * kThreads + threadIdx.x; }
__device__ inline int lane() { return int(threadIdx.x % kLanes); }
__device__ inline int64_t warp_index() { return thread_index() / kLanes; }

/// A grid-stride loop: calls work(i) with every element of this thread.
template <class Work>
__device__ void for_elements(int64_t count, Work&& work) {
  for (int64_t i = thread_index(); i < count; i += int64_t(gridDim.x) * kThreads) work(i);
}

/// Every lane gets the sum, with the same bits.
__device__ inline float warp_sum(float value) {
  for (int step = kLanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}
__device__ inline float warp_max(float value) {
  for (int step = kLanes / 2; step > 0; step /= 2)
    value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
  return value;
}

/// The first thread of a block gets the sum. `partial` is shared memory.
__device__ inline double block_sum(double value, double (&partial)[kThreads]) {
  partial[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  }
  return partial[0];
}

/// The sum of `count` numbers, by one block.
__device__ inline double sum_of(const double* numbers, int64_t count, double (&partial)[kThreads]) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += numbers[i];
  return block_sum(sum, partial);
}

}  // namespace cadre::train::cuda
