#include "cuda/sm90/gathered_rows.cuh"

namespace cadre::cuda::sm90 {

template void launch_gathered_rows<DType::kF16>(const GatheredRowsParams&, int, cudaStream_t);

}  // namespace cadre::cuda::sm90
