#include "cuda/sm90/fp8_rows.cuh"

namespace cadre::cuda::sm90 {

template void launch_fp8_rows<Fp8RowsKind{DType::kE5m2, DType::kBf16, CodeScales::kOfExperts}>(
    const Fp8RowsParams&, int, cudaStream_t);

}  // namespace cadre::cuda::sm90
