#include "backend/expert_scales.h"

#include "cuda/portable/launch.h"
#include "formats/ieee.h"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void multiply_scales_kernel(const backend::ScaleFactors of) {
  const int e = int(blockIdx.x) * kThreads + int(threadIdx.x);
  if (e < of.experts) of.product[e] = formats::mul(of.first[e], of.second[e]);
}

}  // namespace

void multiply_scales(const backend::ScaleFactors& of, Stream stream) {
  const unsigned blocks = unsigned((of.experts + kThreads - 1) / kThreads);
  launch(multiply_scales_kernel, {blocks, kThreads, 0, portable::stream_of(stream)}, of);
}

}  // namespace cadre::cuda
