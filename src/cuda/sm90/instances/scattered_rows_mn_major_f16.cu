#include "cuda/sm90/scattered_rows.cuh"

namespace cadre::cuda::sm90 {

template void launch_scattered_rows<ScatteredRowsKind{false, DType::kF16}>(
    const ScatteredRowsParams&, int, cudaStream_t);

}  // namespace cadre::cuda::sm90
