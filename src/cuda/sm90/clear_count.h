#pragma once
#include <cuda_runtime_api.h>

namespace cadre::cuda::sm90 {

/// Zeroes a count of tiles by a kernel. A memset would keep the kernels before and behind it apart,
/// which otherwise start while their predecessors end.
void clear_count(unsigned long long* taken, cudaStream_t);

}  // namespace cadre::cuda::sm90
