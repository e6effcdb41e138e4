#include "apps/train/cuda/kernels.h"
#include "apps/train/cuda/warp.h"

// The norm; see apps/train/rms_norm.h. A warp has one row; the gain's gradient is summed by
// columns, kChunk rows at a time, and then over the chunks.
namespace cadre::train::cuda {
namespace {

constexpr int64_t kChunk = 64;
constexpr float kEpsilon = 1e-6f;

__global__ void __launch_bounds__(kThreads) norm_kernel(const NormArgs a, float* u) {
  const int64_t t = warp_index();
  if (t >= a.rows) return;
  const float* x = a.x + t * a.width;
  float squares = 0;
  for (int64_t i = lane(); i < a.width; i += kLanes) squares += x[i] * x[i];
  const float rstd = 1.0f / sqrtf(warp_sum(squares) / float(a.width) + kEpsilon);
  if (lane() == 0) a.rstd[t] = rstd;
  for (int64_t i = lane(); i < a.width; i += kLanes) u[t * a.width + i] = x[i] * rstd * a.gain[i];
}

__global__ void __launch_bounds__(kThreads)
    input_gradient_kernel(const NormArgs a, const float* du, float* dx) {
  const int64_t t = warp_index();
  if (t >= a.rows) return;
  const float *x = a.x + t * a.width, *grad = du + t * a.width;
  const float r = a.rstd[t];
  float dot = 0;
  for (int64_t i = lane(); i < a.width; i += kLanes) dot += grad[i] * a.gain[i] * x[i];
  dot = warp_sum(dot) * (r * r * r / float(a.width));
  for (int64_t i = lane(); i < a.width; i += kLanes)
    dx[t * a.width + i] += grad[i] * a.gain[i] * r - dot * x[i];
}

/// Blocks along y are chunks of rows.
__global__ void __launch_bounds__(kThreads)
    gain_gradient_kernel(const NormArgs a, const float* du, float* partial) {
  const int64_t column = thread_index(), first = blockIdx.y * kChunk;
  if (column >= a.width) return;
  float sum = 0;
  for (int64_t t = first; t < first + kChunk && t < a.rows; ++t)
    sum += du[t * a.width + column] * a.x[t * a.width + column] * a.rstd[t];
  partial[blockIdx.y * a.width + column] = sum;
}

__global__ void __launch_bounds__(kThreads)
    sum_chunks_kernel(const float* partial, int64_t chunks, float* dgain, int64_t width) {
  const int64_t column = thread_index();
  if (column >= width) return;
  float sum = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += partial[chunk * width + column];
  dgain[column] = sum;
}

int64_t chunks_of(const NormArgs& args) { return (args.rows + kChunk - 1) / kChunk; }

}  // namespace

using cadre::cuda::launch;

int64_t norm_scratch(const NormArgs& args) { return chunks_of(args) * args.width; }

void norm(const NormArgs& args, float* u, cudaStream_t stream) {
  launch(norm_kernel, grid_of(args.rows * kLanes, stream), args, u);
}

void norm_backward(const NormArgs& args, const NormGradients& g, cudaStream_t stream) {
  launch(input_gradient_kernel, grid_of(args.rows * kLanes, stream), args, g.du, g.dx);
  cadre::cuda::Grid columns = grid_of(args.width, stream);
  columns.blocks.y = unsigned(chunks_of(args));
  launch(gain_gradient_kernel, columns, args, g.du, g.scratch);
  launch(sum_chunks_kernel, grid_of(args.width, stream), g.scratch, chunks_of(args), g.dgain,
         args.width);
}

}  // namespace cadre::train::cuda
