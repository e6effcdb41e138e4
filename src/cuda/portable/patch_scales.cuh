#pragma once
#include "cuda/device/small_float.h"
#include "cuda/portable/row_codes.cuh"
#include "cuda/portable/source_patch.cuh"
#include "formats/list.h"

// Amaxes and scales of the blocks that a thread's patch is in. Lanes that share a block find its
// amax by shuffles, warps that share one by shared memory.
namespace cadre::cuda::portable {

/// Chunks side by side in a warp: as many as its rows have of a block, and four patches below each
/// other where that allows it.
template <class Row>
constexpr int kLanesAcross = Row::kInfo.block == kTileSide ? kAcross : kAcross / 2;

template <class Row>
using PatchOf = Patch<kLanesAcross<Row>>;

/// Amaxes that warps have of columns, or of all their elements, as bits, and what becomes of them.
struct QuantizeShared {
  StripQueue queue;
  alignas(16) uint32_t amax[kQuantizeThreads / kLanes][kTileSide];
  alignas(16) float multipliers[kTileSide];
  alignas(16) float numbers[kTileSide];
};

/// A copy of a tile: where it goes, and what its expert has in common.
struct TileCopy {
  const QuantizeCopy& copy;
  const ExpertTile& tile;
  formats::ExpertScale expert;
  PatchPlace at;   ///< of the codes: transformed rows are stored by whole blocks
  int rows, cols;  ///< of codes in the strip
};

/// What the numbers of a patch are multiplied by, line by line, before they become codes: of its
/// rows, or of its columns; and for a decoded copy what the codes are multiplied by.
struct Factors {
  float of_line[kChunk];
};
template <bool kDecoded>
struct LineScales {
  Factors multipliers, numbers;
};
template <>
struct LineScales<false> {
  Factors multipliers;
};

/// Row::block_scale, in which an instruction makes codes of e4m3.
template <class Row, class Element>
__device__ formats::BlockScale<typename Row::Scale::Code> block_scale(
    uint32_t amax, const formats::ExpertScale& expert, const formats::ScaleOptions& options) {
  const float largest = __uint_as_float(amax);
  if constexpr (Row::Scale::kDType == DType::kE4m3) {
    using Scale = typename Row::Scale;
    const uint32_t code =
        encode_pair<Scale>(Row::template number_of_scale<Element>(largest, expert), 0.0f);
    return {uint8_t(code), Row::multiplier(decode_pair<Scale>(code).x, expert)};
  } else {
    return Row::template block_scale<Element>(largest, expert, options);
  }
}

/// Where scales go, one after the other: those of a patch, or of them those that a thread makes.
template <class Code>
struct ScaleColumn {
  uint8_t* to;
  int64_t step;  ///< bytes to the next
  int lines;     ///< that are there

  __device__ void operator()(int line, Code code) {
    if (line < lines) *reinterpret_cast<Code*>(to) = code;
    to += step;
  }
};

/// Scales of eight lines, each made by one of `kSharing` lanes, which lie kStride apart and all
/// have the amaxes. `store(line, code)` takes them, unless they are of a decoded copy.
template <class Row, class Element, bool kDecoded>
class ScaleMaker {
 public:
  formats::ExpertScale expert;
  formats::ScaleOptions options;

  /// Which of them a thread is.
  template <int kSharing, int kStride>
  __device__ static int mine() {
    return int(threadIdx.x) % kLanes / kStride % kSharing;
  }
  /// `amax(part, mine)` is that of line `part * kSharing + mine`.
  template <int kSharing, int kStride, class Store>
  __device__ LineScales<kDecoded> of_lines(auto&& amax, Store&& store) const {
    constexpr int kEach = kSharing < kChunk ? kChunk / kSharing : 1;
    const int mine = ScaleMaker::mine<kSharing, kStride>();
    const int first = int(threadIdx.x) % kLanes - mine * kStride;
    LineScales<kDecoded> scales;
#pragma unroll
    for (int s = 0; s < kEach; ++s) {
      const auto scale = block_scale<Row, Element>(amax(s, mine), expert, options);
      const int line = s * kSharing + mine;
      if (!kDecoded && line < kChunk) store(line, scale.code);
      const float number = kDecoded ? Row::Scale::decode(scale.code) : 1.0f;
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        if (i / kSharing != s) continue;
        const int from = first + i % kSharing * kStride;
        scales.multipliers.of_line[i] = __shfl_sync(~0u, scale.multiplier, from);
        if constexpr (kDecoded) scales.numbers.of_line[i] = __shfl_sync(~0u, number, from);
      }
    }
    return scales;
  }
  /// Of lines whose amaxes all lanes of a block have. The scale of the first goes to `column.to`.
  template <int kSharing, int kStride, DType kSource>
  __device__ LineScales<kDecoded> of_blocks(const LineMagnitudes<kSource>& amax,
                                            ScaleColumn<typename Row::Scale::Code> column) const {
    column.to += mine<kSharing, kStride>() * column.step;
    column.step *= kSharing;
    return of_lines<kSharing, kStride>(
        [&](int part, int mine) {
          return amax.template of_mine<std::min(kSharing, kChunk)>(part, mine % kChunk);
        },
        column);
  }
};

/// The larger of each line's magnitudes in so many lanes, which lie kStride apart.
template <DType kSource, int kStride, int kCount>
__device__ void reduce_lanes(LineMagnitudes<kSource>& lines) {
#pragma unroll
  for (int step = kStride; step < kStride * kCount; step *= 2)
    for (uint32_t& own : lines.words) own = larger<kSource>(own, __shfl_xor_sync(~0u, own, step));
}

/// The largest of what all warps have of a line in shared memory.
__device__ inline uint32_t largest_of_warps(const QuantizeShared& shared, int line) {
  uint32_t largest = 0;
#pragma unroll
  for (const auto& of_warp : shared.amax) largest = max(largest, of_warp[line]);
  return largest;
}

/// Amaxes and scales of one copy.
template <DType kSource, class Codes>
struct ScalesOfPatch {
  using Row = typename Codes::Row;
  using Element = typename Codes::Element;
  using Scales = LineScales<Codes::kDecoded>;
  using Code = typename Row::Scale::Code;
  static constexpr int kBlock = Row::kInfo.block, kAcrossIt = kLanesAcross<Row>;
  static constexpr int kDownIt = kLanes / kAcrossIt;
  static constexpr int kLanesOfBlock = kBlock / kChunk;

  const TileCopy& of;
  const SourcePatch& patch;

  __device__ ScaleMaker<Row, Element, Codes::kDecoded> maker() const {
    return {of.expert, of.copy.options};
  }

  /// Blocks within rows.
  __device__ Scales of_rows() const {
    LineMagnitudes<kSource> rows_amax(patch.rows);
    reduce_lanes<kSource, 1, kLanesOfBlock>(rows_amax);
    const int col = of.at.col / kBlock * kBlock;
    const int rows = col < of.cols ? of.rows - of.at.row : 0;
    const Lines scales = of.copy.to.scales_of(of.tile, kBlock);
    uint8_t* first =
        scales.at(uint32_t(of.tile.row + of.at.row), uint32_t(of.tile.col + col) / kBlock);
    const int64_t step = scales.columns ? int64_t(sizeof(Code)) : scales.pitch;
    return maker().template of_blocks<kLanesOfBlock, 1>(rows_amax, {first, step, rows});
  }

  /// Blocks down columns, within a warp.
  __device__ Scales of_columns() const {
    auto columns = columns_of<kSource>(patch);
    reduce_lanes<kSource, kAcrossIt, kLanesOfBlock>(columns);
    const int row = of.at.row / kBlock * kBlock;
    const int cols = row < of.rows ? of.cols - of.at.col : 0;
    const Lines scales = of.copy.to.scales_of(of.tile, kBlock);
    uint8_t* first =
        scales.at(uint32_t(of.tile.row + row) / kBlock, uint32_t(of.tile.col + of.at.col));
    const int64_t step = scales.columns ? scales.pitch : int64_t(sizeof(Code));
    return maker().template of_blocks<kLanesOfBlock, kAcrossIt>(columns, {first, step, cols});
  }

  /// Square blocks within a warp.
  __device__ Scales of_square() const {
    uint32_t amax = largest_of_lanes<kLanesOfBlock>(largest_of<kSource>(patch));
#pragma unroll
    for (int step = kAcrossIt; step < kAcrossIt * kLanesOfBlock; step *= 2)
      amax = max(amax, __shfl_xor_sync(~0u, amax, step));
    const int row = of.at.row / kBlock * kBlock, col = of.at.col / kBlock * kBlock;
    const auto scale = maker_scale(amax);
    const bool first = of.at.row == row && of.at.col == col;
    if (!Codes::kDecoded && first && row < of.rows && col < of.cols)
      store(of.copy.to.scales_of(of.tile, kBlock),
            {(of.tile.row + row) / kBlock, (of.tile.col + col) / kBlock}, scale.code);
    return all(scale.multiplier, Row::Scale::decode(scale.code));
  }

  /// Columns of the tile, or all of it, in shared memory: blocks of as many rows as a tile has.
  __device__ Scales of_tile(QuantizeShared& shared, bool square) const {
    auto columns = columns_of<kSource>(patch);
    const int warp = int(threadIdx.x) / kLanes;
    if (square) {
      const uint32_t amax = __reduce_max_sync(~0u, columns.of_all());
      if (threadIdx.x % kLanes == 0) shared.amax[warp][0] = amax;
    } else {
      reduce_lanes<kSource, kAcrossIt, kDownIt>(columns);
      if (threadIdx.x % kLanes < kAcrossIt)
#pragma unroll
        for (int k = 0; k < kChunk; ++k) shared.amax[warp][place(k)] = columns.of_line(k);
    }
    __syncthreads();
    const int first = of.at.col / kTileSide * kTileSide;  // column of the tile
    if (const int i = int(threadIdx.x); i < (square ? 1 : kTileSide)) {
      const auto scale = maker_scale(largest_of_warps(shared, square ? 0 : line_place(i)));
      shared.multipliers[i] = scale.multiplier;
      if constexpr (Codes::kDecoded) shared.numbers[i] = Row::Scale::decode(scale.code);
      const int column = of.tile.col + first;
      if (!Codes::kDecoded && first + i < of.cols && of.rows > 0)
        store(of.copy.to.scales_of(of.tile, kBlock),
              {of.tile.row / kBlock, square ? column / kBlock : column + i}, scale.code);
    }
    __syncthreads();
    if (square) return all(shared.multipliers[0], shared.numbers[0]);
    Scales scales;
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
      scales.multipliers.of_line[k] = shared.multipliers[of.at.col - first + k];
      if constexpr (Codes::kDecoded)
        scales.numbers.of_line[k] = shared.numbers[of.at.col - first + k];
    }
    return scales;
  }

  /// Whole lines, whose amaxes were found before. The first tile of a line stores its scale.
  __device__ Scales of_lines() const {
    const uint32_t* lines = of.copy.lines_of(of.tile);
    const bool down = of.copy.to.down;
    const int first = down ? of.at.col : of.at.row, count = (down ? of.cols : of.rows) - first;
    uint32_t amax[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) amax[i] = i < count ? lines[first + i] : 0;
    const bool stores = (down ? of.tile.row + of.at.row : of.tile.col + of.at.col) == 0;
    const Lines scales = of.copy.to.scales_of(of.tile, kBlock);
    const auto of_line = [&](int i, int) { return amax[i]; };
    return maker().template of_lines<1, 1>(of_line, [&](int i, Code code) {
      if (i >= count || !stores) return;
      const int64_t line = first + i;
      store(scales,
            down ? Place{of.tile.row / kBlock, of.tile.col + line}
                 : Place{of.tile.row + line, of.tile.col / kBlock},
            code);
    });
  }

  __device__ Scales scales(QuantizeShared& shared) const {
    const bool down = of.copy.to.down, across = of.copy.to.across;
    if constexpr (kBlock == 0) {
      return all(of.expert.encode, 1.0f);
    } else if constexpr (kBlock == kWholeLine) {
      return of_lines();
    } else if constexpr (kLanesOfBlock > kDownIt) {
      return down ? of_tile(shared, across) : of_rows();
    } else {
      return !down ? of_rows() : across ? of_square() : of_columns();
    }
  }

 private:
  __device__ auto maker_scale(uint32_t amax) const {
    return block_scale<Row, Element>(amax, of.expert, of.copy.options);
  }
  __device__ static Scales all(float multiplier, float number) {
    Scales scales;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      scales.multipliers.of_line[i] = multiplier;
      if constexpr (Codes::kDecoded) scales.numbers.of_line[i] = number;
    }
    return scales;
  }
  /// Where a column's amax lies: neighbouring chunks side by side, without bank conflicts.
  __device__ int place(int k) const { return k * kAcross + of.at.col / kChunk % kAcross; }
  __device__ static int line_place(int line) { return line % kChunk * kAcross + line / kChunk; }
  __device__ static void store(const Lines& scales, Place at, Code code) {
    *reinterpret_cast<Code*>(scales.at(at.row, at.column)) = code;
  }
};

}  // namespace cadre::cuda::portable
