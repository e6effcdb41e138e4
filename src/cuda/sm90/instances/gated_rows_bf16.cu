#include "cuda/sm90/gated_rows.cuh"

namespace cadre::cuda::sm90 {

template void launch_gated_rows<DType::kBf16>(const GatedRowsParams&, int, cudaStream_t);

}  // namespace cadre::cuda::sm90
