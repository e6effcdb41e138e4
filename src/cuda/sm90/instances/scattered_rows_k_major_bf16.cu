#include "cuda/sm90/scattered_rows.cuh"

namespace cadre::cuda::sm90 {

template void launch_scattered_rows<ScatteredRowsKind{true, DType::kBf16}>(
    const ScatteredRowsParams&, int, cudaStream_t);

}  // namespace cadre::cuda::sm90
