#include "apps/train/bf16.h"
#include "apps/train/cuda/kernels.h"
#include "apps/train/cuda/warp.h"

// What is done to elements one by one.
namespace cadre::train::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    cast_kernel(uint16_t* to, const float* from, int64_t count) {
  for_elements(count, [&](int64_t i) { to[i] = to_bf16(from[i]); });
}

__global__ void __launch_bounds__(kThreads)
    add_f32_kernel(float* to, const float* from, int64_t count) {
  for_elements(count, [&](int64_t i) { to[i] += from[i]; });
}

__global__ void __launch_bounds__(kThreads)
    add_bf16_kernel(float* to, const uint16_t* from, int64_t count) {
  for_elements(count, [&](int64_t i) { to[i] += from_bf16(from[i]); });
}

__global__ void __launch_bounds__(kThreads)
    balance_kernel(const LoadArgs a, float weight, float* dscore, int64_t count) {
  const auto routed = float(a.offsets[a.experts] - a.offsets[0]);
  for_elements(count, [&](int64_t i) {
    const int64_t e = i % a.experts;
    const float share = float(a.offsets[e + 1] - a.offsets[e]) / routed;
    dscore[i] = weight * float(a.experts) * share;
  });
}

__global__ void __launch_bounds__(kThreads) count_rows_kernel(const LoadArgs a, int64_t* load) {
  for_elements(a.experts, [&](int64_t e) { load[e] += a.offsets[e + 1] - a.offsets[e]; });
}

}  // namespace

using cadre::cuda::launch;

void cast_to_bf16(uint16_t* to, const float* from, int64_t count, cudaStream_t stream) {
  launch(cast_kernel, grid_of_elements(count, stream), to, from, count);
}

void add_f32(float* to, const float* from, int64_t count, cudaStream_t stream) {
  launch(add_f32_kernel, grid_of_elements(count, stream), to, from, count);
}

void add_bf16(float* to, const uint16_t* from, int64_t count, cudaStream_t stream) {
  launch(add_bf16_kernel, grid_of_elements(count, stream), to, from, count);
}

void balance(const LoadArgs& args, float weight, float* dscore, int64_t count,
             cudaStream_t stream) {
  launch(balance_kernel, grid_of_elements(count, stream), args, weight, dscore, count);
}

void count_rows(const LoadArgs& args, int64_t* load, cudaStream_t stream) {
  launch(count_rows_kernel, grid_of_elements(args.experts, stream), args, load);
}

}  // namespace cadre::train::cuda
