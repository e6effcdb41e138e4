#include "apps/train/cuda/kernels.h"
#include "apps/train/cuda/warp.h"

// The optimizer; see apps/train/adamw.h. The squares of all gradients are summed by chunks, then
// one block sums the chunks and finds the factor of the gradients, which no host waits for.
namespace cadre::train::cuda {
namespace {

constexpr int64_t kChunk = 4096;

__global__ void __launch_bounds__(kThreads)
    square_kernel(const float* grad, int64_t count, double* sums) {
  __shared__ double partial[kThreads];
  const int64_t first = blockIdx.x * kChunk;
  double sum = 0;
  for (int64_t i = first + threadIdx.x; i < first + kChunk && i < count; i += kThreads)
    sum += double(grad[i]) * double(grad[i]);
  sum = block_sum(sum, partial);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

/// As AdamW::clip.
__global__ void __launch_bounds__(kThreads)
    clip_kernel(const double* sums, int64_t count, double grad_scale, float* scale) {
  __shared__ double partial[kThreads];
  const double norm = sqrt(sum_of(sums, count, partial)) * grad_scale;
  if (threadIdx.x == 0) *scale = float(norm > 1 ? grad_scale / norm : grad_scale);
}

__global__ void __launch_bounds__(kThreads)
    update_kernel(const AdamW::Factors factors, const Weight weight, const float* scale) {
  for_elements(weight.count, [&](int64_t i) {
    factors.update(weight.grad[i] * *scale, weight.value[i], weight.mean[i], weight.square[i]);
  });
}

int64_t chunks_of(const Weight& weight) { return (weight.count + kChunk - 1) / kChunk; }

}  // namespace

int64_t adamw_scratch(std::span<const Weight> weights) {
  int64_t numbers = 1;  // the factor
  for (const Weight& weight : weights) numbers += chunks_of(weight);
  return numbers;
}

void adamw(const AdamW& adamw, std::span<const Weight> weights, double* scratch,
           cudaStream_t stream) {
  auto* scale = reinterpret_cast<float*>(scratch);
  double *sums = scratch + 1, *end = sums;
  for (const Weight& weight : weights) {
    cadre::cuda::launch(square_kernel, grid_of(chunks_of(weight) * kThreads, stream), weight.grad,
                        weight.count, end);
    end += chunks_of(weight);
  }
  cadre::cuda::launch(clip_kernel, grid_of(kThreads, stream), sums, int64_t(end - sums),
                      adamw.grad_scale, scale);
  for (const Weight& weight : weights) {
    cadre::cuda::launch(update_kernel, grid_of_elements(weight.count, stream),
                        adamw.factors(weight.decays), weight, scale);
  }
}

}  // namespace cadre::train::cuda
