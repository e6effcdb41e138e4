#pragma once
#include <cstdint>

// Prefix sums and maxima of the threads of a warp or of a block, in thread order.
namespace cadre::cuda {

struct Sum {
  __device__ int64_t operator()(int64_t a, int64_t b) const { return a + b; }
};
struct Largest {
  template <class Value>
  __device__ Value operator()(Value a, Value b) const {
    return a < b ? b : a;
  }
};

/// What `join` makes of the values up to and with this thread's, and of all.
struct Scanned {
  int64_t upto, all;
};

template <class Value, class Join>
__device__ Value warp_scan(Value value, Join join) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const Value before = __shfl_up_sync(~0u, value, step);
    if (int(threadIdx.x % 32) >= step) value = join(before, value);
  }
  return value;
}

/// Every thread of a block of whole warps must call it. `partial` is shared memory, free again when
/// it returns. Values are 0 or more, since 0 is the neutral one.
template <class Join>
__device__ Scanned block_scan(int64_t value, int64_t (&partial)[32], Join join) {
  const int warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32);
  const int warps = int(blockDim.x / 32);
  int64_t upto = warp_scan(value, join);
  if (lane == 31) partial[warp] = upto;
  __syncthreads();
  if (warp == 0) partial[lane] = warp_scan(lane < warps ? partial[lane] : int64_t(0), join);
  __syncthreads();
  if (warp > 0) upto = join(partial[warp - 1], upto);
  const int64_t all = partial[31];
  __syncthreads();
  return {upto, all};
}

}  // namespace cadre::cuda
