#include "cuda/sm90/gathered_products.cuh"

namespace cadre::cuda::sm90 {

template void launch_gathered_products<GatheredProductsKind{true, DType::kF16}>(
    const GatheredProductsParams&, int, cudaStream_t);

}  // namespace cadre::cuda::sm90
