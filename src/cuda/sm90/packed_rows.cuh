#pragma once
#include "cuda/device/word.h"
#include "cuda/sm90/multiply_packed.cuh"
#include "cuda/sm90/packed_rows.h"
#include "cuda/sm90/ragged_rows.cuh"
#include "formats/list.h"

// y[r, c] = alpha_e * sum_d x[r, d] * w_e[c, d] (+ as of ragged_rows.cuh), where w_e[c, d] is the
// bf16 number of a code times its block scale: fprop of bf16 rows and packed weights.
//
// w [E, C, D] are codes as they are stored, decoded on their way into the tensor cores; the rest is
// ragged_rows.cuh, and so are the bits.
namespace cadre::cuda::sm90 {

/// As RaggedRowsSchedule. Tiles are short, so a cluster that begins late may have its first one
/// dealt out. kPrefetches: before a tile is published the first block scales of its rows are asked
/// for, so that whoever begins it waits for L2, not for memory.
template <Tile kTile, bool kPrefetches>
class NarrowRowsSchedule : RaggedRowsSchedule<kTile> {
 public:
  using Base = RaggedRowsSchedule<kTile>;
  using Base::kByWarp;
  static constexpr bool kDealsFirst = true;

  __device__ explicit NarrowRowsSchedule(const PackedRowsParams& params)
      : Base(params), scales_(params.w_scales) {}

  __device__ TileRecord tile(int64_t number) {
    const TileRecord tile = Base::tile(number);
    if (!kPrefetches || tile.is_last()) return tile;
    const char* scales = scales_.of(tile.expert);
    const int end = min(tile.row_limit, tile.row + kTile.rows());
    for (int row = tile.row + int(threadIdx.x) % kWarp; row < end; row += kWarp)
      prefetch_line(scales + scales_.row_at(row));
    return tile;
  }

 private:
  const PackedScales& scales_;
};

/// As RaggedRowsLoad, with codes for the weight.
template <Tile kTile>
class PackedRowsLoad : RaggedRowsLoad<kTile> {
 public:
  using Base = RaggedRowsLoad<kTile>;
  using Base::kArrivals, Base::kWarps;

  __device__ PackedRowsLoad(const PackedRowsParams& params, const TileRecord& tile)
      : Base(params, tile) {}

  __device__ void load(const Stage& stage, Barrier& full, int depth) const {
    this->expect(full);
    const int col = depth * element_bits(kTile.a.dtype) / 8;
    tma_load(stage.a, *this->w_, Box3{col, this->tile_.row, this->expert_}, full);
    this->load_batch(stage, full, depth);
  }
};

template <FormatKind kWeights>
struct PackedFormat;
template <>
struct PackedFormat<FormatKind::kMxfp4> : formats::Mxfp4 {};
template <>
struct PackedFormat<FormatKind::kNvfp4> : formats::Nvfp4 {};
template <>
struct PackedFormat<FormatKind::kMxfp8> : formats::Mxfp8 {};

constexpr Tile packed_tile(DType codes, PackedWidth width) {
  Tile tile{.cols = kColsOfPacked,
            .depth = kDepthOfPacked,
            .stages = codes == DType::kE2m1 ? kStagesOfFourBits : kStagesOfEightBits,
            .a = {codes, true},
            .b = {DType::kBf16, true}};
  if (width == PackedWidth::kWide) return tile;
  tile.consumers = kConsumersOfNarrow;
  tile.cols = kColsOfNarrow, tile.depth = kDepthOfNarrow, tile.stages = kStagesOfNarrow;
  if (width == PackedWidth::kMiddle) tile.cols = kColsOfMiddle, tile.stages = kStagesOfMiddle;
  if (width == PackedWidth::kNarrowest) {
    tile.cols = kColsOfNarrowest, tile.stages = kStagesOfNarrowestEightBits;
    if (codes == DType::kE2m1) tile.depth = kDepthOfNarrowest, tile.stages = kStagesOfNarrowest;
  }
  return tile;
}

constexpr OutputShape packed_output(DType out, PackedWidth width) {
  OutputShape shape = output_of_rows(out);
  shape.part_cols = packed_part(out, width);
  return shape;
}

/// The kernel of fprop with packed weights.
template <PackedRowsKind kKind>
struct PackedRows {
  using Format = PackedFormat<kKind.weights>;
  static constexpr Tile kTile = packed_tile(Format::kInfo.element, kKind.width);
  using Params = PackedRowsParams;
  static constexpr bool kFourBits = Format::kInfo.element == DType::kE2m1;
  using Schedule =
      std::conditional_t<kKind.width == PackedWidth::kNarrowest,
                         NarrowRowsSchedule<kTile, kFourBits>, RaggedRowsSchedule<kTile>>;
  using Load = PackedRowsLoad<kTile>;
  using Multiply = MultiplyPacked<kTile, Format, kKind.decoding>;
  using Store = RaggedRowsStore<packed_output(kKind.out, kKind.width)>;
};

template <PackedRowsKind kKind>
void launch_packed_rows(const PackedRowsParams& params, int blocks, cudaStream_t stream) {
  launch_kernel<PackedRows<kKind>>(params, blocks, stream);
}

}  // namespace cadre::cuda::sm90
