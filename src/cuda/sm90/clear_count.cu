#include "cuda/sm90/clear_count.h"

#include "cuda/device/launch.h"

namespace cadre::cuda::sm90 {
namespace {

__global__ void clear_kernel(unsigned long long* taken) {
  begin_dependent();
  *taken = 0;
}

}  // namespace

void clear_count(unsigned long long* taken, cudaStream_t stream) {
  cuda::launch(clear_kernel, {.blocks = 1, .threads = 1, .stream = stream, .dependent = true},
               taken);
}

}  // namespace cadre::cuda::sm90
