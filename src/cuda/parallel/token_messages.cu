#include "cuda/parallel/token_messages.h"

#include <algorithm>

#include "cuda/device/launch.h"

namespace cadre::cuda {
namespace {

using schedule::ComingTokens;
using schedule::LeavingTokens;

constexpr int kThreads = 256, kMostBlocks = 1024;

/// Calls work(step) for all steps, a thread each.
template <class Work>
__device__ void for_steps(int64_t steps, Work&& work) {
  begin_dependent();
  const int64_t all = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < steps; i += all) work(i);
}

__global__ void first_choices_kernel(const __grid_constant__ LeavingTokens tokens) {
  for_steps(tokens.choices, [&](int64_t choice) { tokens.find_first(choice); });
}

__global__ void numbers_kernel(const __grid_constant__ LeavingTokens tokens) {
  for_steps(tokens.steps(), [&](int64_t step) { tokens.number(step); });
}

__global__ void tokens_kernel(const __grid_constant__ ComingTokens tokens) {
  for_steps(tokens.steps(), [&](int64_t row) { tokens.find(row); });
}

Grid grid_of(int64_t steps, cudaStream_t stream) {
  const int64_t blocks = (steps + kThreads - 1) / kThreads;
  return {.blocks = unsigned(std::clamp<int64_t>(blocks, 1, kMostBlocks)),
          .threads = kThreads,
          .stream = stream,
          .dependent = true};
}

}  // namespace

void find_first_choices(const LeavingTokens& tokens, cudaStream_t stream) {
  launch(first_choices_kernel, grid_of(tokens.choices, stream), tokens);
}

void number_tokens(const LeavingTokens& tokens, cudaStream_t stream) {
  launch(numbers_kernel, grid_of(tokens.steps(), stream), tokens);
}

void find_tokens(const ComingTokens& tokens, cudaStream_t stream) {
  launch(tokens_kernel, grid_of(tokens.steps(), stream), tokens);
}

}  // namespace cadre::cuda
