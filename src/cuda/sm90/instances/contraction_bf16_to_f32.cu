#include "cuda/sm90/ragged_contraction.cuh"

namespace cadre::cuda::sm90 {

template void launch_ragged_contraction<RaggedContractionKind{DType::kBf16, DType::kF32}>(
    const RaggedContractionParams&, int, cudaStream_t);

}  // namespace cadre::cuda::sm90
