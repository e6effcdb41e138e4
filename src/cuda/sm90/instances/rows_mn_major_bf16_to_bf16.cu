#include "cuda/sm90/ragged_rows.cuh"

namespace cadre::cuda::sm90 {

template void launch_ragged_rows<RaggedRowsKind{false, DType::kBf16, DType::kBf16}>(
    const RaggedRowsParams&, int, cudaStream_t);

}  // namespace cadre::cuda::sm90
