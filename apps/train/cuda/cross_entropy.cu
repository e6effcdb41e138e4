#include "apps/train/cuda/kernels.h"
#include "apps/train/cuda/warp.h"

// Loss and gradient of the scores; see apps/train/cross_entropy.h. A warp has one row, a lane every
// 32nd score.
namespace cadre::train::cuda {
namespace {

constexpr int kScores = 256 / kLanes;  // of a lane

__global__ void __launch_bounds__(kThreads) cross_entropy_kernel(const LossArgs a) {
  const int64_t t = warp_index();
  if (t >= a.rows) return;
  float* row = a.logits + t * kScores * kLanes + lane();
  const int target = a.targets[t];
  float score[kScores], largest = -INFINITY, wanted = 0, sum = 0;
  for (int i = 0; i < kScores; ++i) largest = fmaxf(largest, score[i] = row[i * kLanes]);
  largest = warp_max(largest);
  for (int i = 0; i < kScores; ++i) {
    if (i * kLanes + lane() == target) wanted = score[i] - largest;
    sum += score[i] = expf(score[i] - largest);
  }
  sum = warp_sum(sum);
  wanted = warp_sum(wanted);  // of one lane
  for (int i = 0; i < kScores; ++i)
    row[i * kLanes] = score[i] / sum - (i * kLanes + lane() == target ? 1.0f : 0.0f);
  if (lane() == 0) a.scratch[t] = log(double(sum)) - double(wanted);
}

__global__ void __launch_bounds__(kThreads)
    add_loss_kernel(const double* losses, int64_t rows, double* loss) {
  __shared__ double partial[kThreads];
  const double sum = sum_of(losses, rows, partial);
  if (threadIdx.x == 0) *loss += sum;
}

}  // namespace

void cross_entropy(const LossArgs& args, cudaStream_t stream) {
  cadre::cuda::launch(cross_entropy_kernel, grid_of(args.rows * kLanes, stream), args);
  cadre::cuda::launch(add_loss_kernel, grid_of(kThreads, stream), args.scratch, args.rows,
                      args.loss);
}

}  // namespace cadre::train::cuda
