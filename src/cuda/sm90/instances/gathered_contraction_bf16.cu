#include "cuda/sm90/gathered_contraction.cuh"

namespace cadre::cuda::sm90 {

template void launch_gathered_contraction<GatheredContractionKind{DType::kBf16, false}>(
    const GatheredContractionParams&, int, cudaStream_t);

}  // namespace cadre::cuda::sm90
