#include "cuda/sm90/packed_rows.cuh"

namespace cadre::cuda::sm90 {

template void launch_packed_rows<PackedRowsKind{FormatKind::kMxfp8, DType::kF32}>(
    const PackedRowsParams&, int, cudaStream_t);

}  // namespace cadre::cuda::sm90
