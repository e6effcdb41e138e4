#pragma once
#include "cuda/portable/quantize_parts.cuh"

// Codes and scales of routed rows along rows, or both ways, of bf16, in formats whose blocks are as
// long as a tile. A block takes 128 rows of one expert and 128 columns at a time. Every warp finds
// them by itself, and has 16 of the rows in registers; of columns the warps show each other their
// amaxes. As kernels by warps it is compiled for what becomes of each way, and for wide chunks and
// whole words alone.
namespace cadre::cuda::portable {

constexpr PartShape kTilePart{kTileSide / kChunk, false, kChunk, kQuantizeThreads};

/// Whether blocks of a format are as long as a tile, and need no amax from before.
template <class Row>
constexpr bool kHasTiles = Row::kInfo.block == kTileSide && !Row::kInfo.has_expert_scale;

/// What warps show each other: their amaxes of columns, and what becomes of these.
struct ColumnsOfTile {
  alignas(16) uint32_t amax[kQuantizeThreads / kLanes][kTileSide / 2];  ///< halves with any sign
  alignas(16) float multipliers[kTileSide];
  alignas(16) float numbers[kTileSide];

  /// The amaxes of this warp.
  __device__ void show(PatchPlace at, const SourcePatch& patch) {
    auto columns = columns_of<DType::kBf16>(patch);
    reduce_lanes<DType::kBf16, kAcross, kLanes / kAcross>(columns);
    const auto& [a, b, c, d] = columns.words;
    if (threadIdx.x % kLanes < kAcross)
      *reinterpret_cast<uint4*>(&amax[threadIdx.x / kLanes][at.col / 2]) = {a, b, c, d};
  }
  /// The scale of a column, each of which a thread makes of what all warps have shown.
  template <class Codes>
  __device__ void make_scale(const CopyLines& copy, const Part& part) {
    using Row = typename Codes::Row;
    const int column = int(threadIdx.x);
    if (column >= kTileSide) return;
    LineMagnitudes<DType::kBf16> all = {};
#pragma unroll
    for (const auto& of_warp : amax)
      all.words[0] = larger<DType::kBf16>(all.words[0], of_warp[column / 2]);
    const auto scale =
        block_scale<Row, typename Codes::Element>(all.of_mine<2>(0, column % 2), {}, copy.options);
    multipliers[column] = scale.multiplier;
    if constexpr (Codes::kDecoded)
      numbers[column] = Row::Scale::decode(scale.code);
    else if (column < part.cols)
      *reinterpret_cast<typename Row::Scale::Code*>(
          scale_of_part<kTileSide, false>(copy, part, 0, column)) = scale.code;
  }
  /// The scales of a patch.
  template <class Codes>
  __device__ LineScales<Codes::kDecoded> scales(PatchPlace at) const {
    LineScales<Codes::kDecoded> scales;
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
      scales.multipliers.of_line[k] = multipliers[at.col + k];
      if constexpr (Codes::kDecoded) scales.numbers.of_line[k] = numbers[at.col + k];
    }
    return scales;
  }
};

template <class Of, class Parts>
__global__ void __launch_bounds__(kQuantizeThreads, kPartsAtOnce<Of>)
    quantize_tiles_kernel(const __grid_constant__ PartsJob job) {
  begin_dependent();
  __shared__ ColumnsOfTile columns;
  constexpr auto kKindOf = [](CopyKind kind) {
    return CodesKind{kind == CopyKind::kNumbers, false};
  };
  using Row = typename Of::Row;
  using AlongK = CodesOf<Row, typename Of::Element, kKindOf(Of::kCopies.along_k)>;
  using AlongRows = CodesOf<Row, typename Of::Element, kKindOf(Of::kCopies.along_rows)>;
  const auto mine = PatchOf<Row>::of_thread(0);
  Part part;
  for (Parts parts(job.of); parts.next(part);) {
    if (part.cols <= 0) return;
    const PatchPlace at(mine, part.rows, part.cols);
    const SourcePatch patch = load_part(job, part, at);
    columns.show(at, patch);
    __syncthreads();
    columns.template make_scale<AlongRows>(job.along_rows, part);
    // Always true, as in kernels by warps.
    if constexpr (Of::kCopies.along_k != CopyKind::kNone)
      if (job.along_k.codes != nullptr) quantize_copy<AlongK, true>(job.along_k, part, at, patch);
    __syncthreads();
    encode_copy<AlongRows, false>(job.along_rows, part, at, patch,
                                  columns.template scales<AlongRows>(at));
  }
}

template <class Row, class Element>
void launch_quantize_tiles(const QuantizeJob& all, const QuantizeStream& on) {
  using Parts = BatchParts<kTilePart>;
  const PartsJob job = parts_job(all);
  if (job.of.rows == 0 || job.of.cols == 0) return;
  visit_parts<Row, Element>(
      all, [&]<class Of>() { launch_parts<Parts>(quantize_tiles_kernel<Of, Parts>, job, on); });
}

}  // namespace cadre::cuda::portable
