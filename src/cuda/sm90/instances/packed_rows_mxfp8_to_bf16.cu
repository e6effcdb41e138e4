#include "cuda/sm90/packed_rows.cuh"

namespace cadre::cuda::sm90 {

template void launch_packed_rows<PackedRowsKind{FormatKind::kMxfp8, DType::kBf16}>(
    const PackedRowsParams&, int, cudaStream_t);
template void launch_packed_rows<PackedRowsKind{
    .weights = FormatKind::kMxfp8, .decoding = Decoding::kSplit}>(const PackedRowsParams&, int,
                                                                  cudaStream_t);
template void launch_packed_rows<PackedRowsKind{FormatKind::kMxfp8, DType::kBf16,
                                                PackedWidth::kMiddle, Decoding::kSplit}>(
    const PackedRowsParams&, int, cudaStream_t);
template void launch_packed_rows<PackedRowsKind{FormatKind::kMxfp8, DType::kBf16,
                                                PackedWidth::kNarrow, Decoding::kSplit}>(
    const PackedRowsParams&, int, cudaStream_t);
template void launch_packed_rows<PackedRowsKind{FormatKind::kMxfp8, DType::kBf16,
                                                PackedWidth::kNarrowest, Decoding::kSplit}>(
    const PackedRowsParams&, int, cudaStream_t);

}  // namespace cadre::cuda::sm90
