#pragma once
#include "cuda/portable/quantize_parts.cuh"
#include "cuda/portable/quantize_rows.cuh"
#include "cuda/portable/quantize_sixteens.cuh"
#include "cuda/portable/quantize_square_tiles.cuh"
#include "cuda/portable/quantize_squares.cuh"
#include "cuda/portable/quantize_tiles.cuh"

// Codes and scales of routed rows or weights, along K, along rows, or both from one read.
//
// Persistent blocks take tiles of 128 x 128 elements, which hold whole blocks of every format; a
// thread takes a patch of eight rows and eight columns, in registers. Lanes that share a block find
// its amax by shuffles, warps that share one by shared memory. Rows that no expert owns are neither
// read nor written.
namespace cadre::cuda::portable {

/// One copy of a patch.
template <DType kSource, class Codes>
__device__ void quantize_patch(const QuantizeJob& job, QuantizeShared& shared, const TileCopy& of,
                               const SourcePatch& patch) {
  const auto scales = ScalesOfPatch<kSource, Codes>{of, patch}.scales(shared);
  // What all elements have in common is taken row by row too. Where that pays it is compiled for
  // both, which spares a choice for each element; elsewhere instructions would be too many.
  const bool by_row = !of.copy.to.down || of.copy.to.across;
  if (!EightCodes<typename Codes::Element>::kNibbles && Codes::Row::kInfo.block != kTileSide)
    encode_patch<kSource, Codes>(job, of, patch, scales, by_row);
  else if (by_row)
    encode_patch<kSource, Codes>(job, of, patch, scales, true);
  else
    encode_patch<kSource, Codes>(job, of, patch, scales, false);
}

/// All copies of a tile; a transformed one is of bf16 numbers, and the last.
template <DType kSource, class Codes>
__device__ void quantize_tile(const QuantizeJob& job, QuantizeShared& shared,
                              const ExpertTile& tile, int column) {
  using Row = typename Codes::Row;
  auto place = PatchOf<Row>::of_thread(column);
  if (Row::kInfo.block == kTileSide && job.is_square()) {
    // Of a square tile any patch will do: four below each other fill sectors of turned codes.
    const auto other = Patch<kAcross / 2>::of_thread(column);
    place = {other.row, other.chunk};
  }
  SourcePatch patch = load_patch<kSource>(job, tile, PatchPlace(place, tile.rows, tile.cols));
#pragma unroll 1
  for (int i = 0; i < job.count; ++i) {
    const QuantizeCopy& copy = job.copies[i];
    const int rows = copy.to.rows_of(tile);
    const TileCopy of{copy,
                      tile,
                      expert_scale<Row, typename Codes::Element>(copy, tile.expert),
                      PatchPlace(place, rows, tile.cols),
                      rows,
                      tile.cols};
    if constexpr (Row::kInfo.takes_hadamard)
      if (copy.to.transformed) {
        transform<kSource, kLanesAcross<Row>>(patch);
        if constexpr (kSource != DType::kBf16) {
          quantize_patch<DType::kBf16, Codes>(job, shared, of, patch);
          continue;
        }
      }
    quantize_patch<kSource, Codes>(job, shared, of, patch);
  }
}

/// Blocks of an SM at once, as many as registers allow.
template <DType kSource, class Codes>
constexpr int quantize_blocks() {
  constexpr bool wide = kSource == DType::kF32;
  constexpr bool nibbles = EightCodes<typename Codes::Element>::kNibbles;
  constexpr bool both_types = Codes::Row::kInfo.takes_hadamard && kSource != DType::kBf16;
  constexpr int block = Codes::Row::kInfo.block;
  constexpr bool many = Codes::kDecoded || nibbles || (block != 0 && block != kWholeLine);
  constexpr bool random = Codes::kStochastic && (Codes::kDecoded || kSource != DType::kBf16);
  return random || both_types || (wide && many) ? 1 : 2;
}

template <DType kSource, class Codes>
__global__ void __launch_bounds__(kQuantizeThreads, quantize_blocks<kSource, Codes>())
    quantize_kernel(const __grid_constant__ QuantizeJob job) {
  auto& shared = *reinterpret_cast<QuantizeShared*>(dynamic_shared());
  if constexpr (Codes::Row::kInfo.has_expert_scale)
    store_expert_scales<typename Codes::Row, typename Codes::Element>(
        job, int64_t(blockIdx.x) * kQuantizeThreads + threadIdx.x,
        int64_t(gridDim.x) * kQuantizeThreads);
  walk_tiles(job.of, shared.queue, [&](const ExpertTile& tile, int column) {
    quantize_tile<kSource, Codes>(job, shared, tile, column);
  });
}

template <class Codes>
void launch_tiles(const QuantizeJob& job, const QuantizeStream& on) {
  visit_plain(job.source.first.dtype, [&]<DType kSource>() {
    on.launch_strips(quantize_kernel<kSource, Codes>,
                     {quantize_blocks<kSource, Codes>(), sizeof(QuantizeShared)}, job);
  });
}

/// Copies that have the same kind.
template <class Row, class Element>
void launch_quantize(const QuantizeJob& job, const QuantizeStream& on) {
  if constexpr (kHasRowCodes<Row>)
    if (takes_row_codes(job)) return launch_quantize_rows<Row, Element>(job, on);
  if constexpr (kHasParts<Row>)
    if (takes_parts<Row, Element>(job)) return launch_quantize_parts<Row, Element>(job, on);
  if constexpr (kHasTiles<Row>) {
    if (job.of.offsets != nullptr && takes_parts<Row, Element>(job))
      return launch_quantize_tiles<Row, Element>(job, on);
    if (takes_square_tiles<Element>(job))
      return launch_quantize_square_tiles<Row, Element>(job, on);
  }
  if constexpr (kHasSixteens<Row>) {
    if (takes_sixteens<Element>(job)) return launch_quantize_sixteens<Row, Element>(job, on);
    if (takes_squares<Element>(job)) return launch_quantize_squares<Row, Element>(job, on);
  }
  if (job.count == 2 && job.copies[0].to.decoded != job.copies[1].to.decoded) {
    for (const QuantizeCopy& copy : job.copies)
      launch_quantize<Row, Element>(job.with_one(copy), on);
    return;
  }
  const auto with = [&]<bool kStochastic>() {
    job.copies[0].to.decoded
        ? launch_tiles<CodesOf<Row, Element, CodesKind{true, kStochastic}>>(job, on)
        : launch_tiles<CodesOf<Row, Element, CodesKind{false, kStochastic}>>(job, on);
  };
  if constexpr (Row::kInfo.takes_stochastic)
    if (job.copies[0].stochastic) return with.template operator()<true>();
  with.template operator()<false>();
}

}  // namespace cadre::cuda::portable
