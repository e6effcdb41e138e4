#include "cuda/sm90/packed_rows.cuh"

namespace cadre::cuda::sm90 {

template void launch_packed_rows<PackedRowsKind{FormatKind::kNvfp4, DType::kBf16}>(
    const PackedRowsParams&, int, cudaStream_t);
template void launch_packed_rows<PackedRowsKind{FormatKind::kNvfp4, DType::kBf16,
                                                PackedWidth::kNarrow, Decoding::kTable}>(
    const PackedRowsParams&, int, cudaStream_t);
template void launch_packed_rows<PackedRowsKind{FormatKind::kNvfp4, DType::kBf16,
                                                PackedWidth::kNarrowest, Decoding::kTable}>(
    const PackedRowsParams&, int, cudaStream_t);

}  // namespace cadre::cuda::sm90
