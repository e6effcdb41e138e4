#pragma once
#include <algorithm>
#include <cstdint>

#include "cadre/quantize.h"
#include "cuda/device/chunk.h"
#include "cuda/portable/launch.h"
#include "schedule/tiles.h"

// What quantising and dequantising share: tiles of at most 128 rows of one expert and 128 columns,
// which hold whole blocks of every format, and where codes and scales lie. Of a tile a thread takes
// eight rows and eight columns.
namespace cadre::cuda::portable {

constexpr int kQuantizeThreads = 256;
constexpr int kTileSide = 128;               // rows and columns
constexpr int kAcross = kTileSide / kChunk;  // chunks of eight in a line

/// Whose rows they are: routed rows with offsets, or N of each expert.
struct ExpertsRows {
  int64_t rows = 0, cols = 0;  ///< R or N; C or K
  int experts = 1;
  const int32_t* offsets = nullptr;  ///< null: weights
  int strip = kTileSide;             ///< columns of the tiles that a block takes at once

  CADRE_HD int64_t across() const { return (cols + strip - 1) / strip; }
  CADRE_HD int64_t down() const { return (rows + kTileSide - 1) / kTileSide; }
  /// Tiles of all experts, or more.
  int64_t most_tiles() const {
    const int64_t ragged = rows / kTileSide + std::min<int64_t>(rows, experts);
    return (offsets == nullptr ? experts * down() : ragged) * across();
  }
};

/// A part of one expert: a tile, or some side by side.
struct ExpertTile {
  int expert;      ///< -1: there are no more
  int first;       ///< of the expert's rows in the batch; 0 for weights
  int row, col;    ///< of the tile's first element, within the expert
  int rows, cols;  ///< that are there
};

/// Finds the strips of a block, one after the other. Lives in shared memory, for one thread, and
/// the others wait for it: so numbers of strips have 32 bits, and of an expert none is divided.
class StripFinder {
 public:
  __device__ void start(const ExpertsRows& all) {
    number_ = blockIdx.x;
    if (all.offsets != nullptr) search_ = {all.offsets, all.experts, all.rows};
  }
  /// Not inlined, since only one thread calls it.
  __device__ __noinline__ void next(const ExpertsRows& all, ExpertTile& strip) {
    const uint32_t number = number_, across = uint32_t(all.cols - 1) / uint32_t(all.strip) + 1;
    number_ += gridDim.x;
    strip = {-1, 0, 0, 0, 0, 0};
    int rows = int(all.rows);
    uint32_t index = number;
    if (all.offsets == nullptr) {
      const uint32_t each = uint32_t(all.down()) * across;
      if (number >= each * uint32_t(all.experts)) return;
      strip.expert = int(number / each);
      index = number % each;
    } else {
      schedule::ExpertSearch search = search_;  // in registers
      const bool found = search.seek(
          number, [&](int64_t of) { return uint32_t(of + kTileSide - 1) / kTileSide * across; });
      search_ = search;
      if (!found) return;
      strip.expert = search.expert();
      strip.first = int(search.rows().first);
      rows = int(search.rows().count());
      index = uint32_t(search.index());
    }
    strip.row = int(index / across) * kTileSide;
    strip.col = int(index % across) * all.strip;
    strip.rows = min(rows - strip.row, kTileSide);
    strip.cols = min(int(all.cols) - strip.col, all.strip);
  }

 private:
  uint32_t number_;
  schedule::ExpertSearch search_;
};

/// The strip that a block has, and the next one.
struct TileQueue {
  StripFinder finder;
  ExpertTile strips[2];
};

/// Calls work(strip, column) for every tile of a block, by all of its threads, with the first
/// column of the tile in its strip. One thread looks for the next strip meanwhile.
template <class Work>
__device__ void walk_tiles(const ExpertsRows& all, TileQueue& queue, Work&& work) {
  if (threadIdx.x == 0) {
    queue.finder.start(all);
    queue.finder.next(all, queue.strips[0]);
  }
  for (int turn = 0;; turn ^= 1) {
    __syncthreads();
    const ExpertTile& strip = queue.strips[turn];
    if (strip.expert < 0) return;
    if (threadIdx.x == 0) queue.finder.next(all, queue.strips[turn ^ 1]);
#pragma unroll 1
    for (int column = 0; column < strip.cols; column += kTileSide) work(strip, column);
  }
}

/// Rows or columns of codes or scales.
struct Lines {
  uint8_t* data = nullptr;
  int64_t pitch = 0, expert = 0;  ///< bytes from line to line, and from expert to expert
  int bits = 8;                   ///< of an element
  bool columns = false;

  Lines() = default;
  Lines(const TensorView& v, Major major)
      : data(static_cast<uint8_t*>(v.data)),
        bits(cadre::bits(v.dtype)),
        columns(major == Major::kColumn) {
    if (v.rank == 0) return;
    pitch = bytes_for(v.dtype, v.stride[size_t(v.rank - (columns ? 1 : 2))]);
    if (v.rank == 3) expert = bytes_for(v.dtype, v.stride[0]);
  }
  /// Where an element begins; the odd one of two nibbles where its byte does. Of a tile, numbers of
  /// 32 bits do, which take fewer instructions.
  template <class Index>
  __device__ uint8_t* at(Index row, Index col) const {
    const Index line = columns ? col : row, place = columns ? row : col;
    return data + line * pitch + (uint64_t(place) * uint32_t(bits) >> 3);
  }
  /// Those of an expert, from a row on.
  __device__ Lines from(int e, int64_t row) const {
    Lines lines = *this;
    lines.data = at(uint32_t(row), 0u) + uint32_t(e) * expert;
    return lines;
  }
};

/// One quantised tensor in device memory.
struct QuantizedMatrix {
  Lines codes, scales;
  float* expert_scale = nullptr;
  bool across = true, down = false;  ///< which way blocks run; both: square ones
  bool ragged = true, transformed = false;
  bool decoded = false;                    ///< numbers in place of codes
  const int32_t* block_offsets = nullptr;  ///< [E + 1]: of transformed blocks without gaps

  QuantizedMatrix() = default;
  QuantizedMatrix(const QuantizedShape& s, const QuantizedView& v)
      : codes(v.codes, s.codes_major),
        scales(v.scales, s.scales_major),
        expert_scale(v.expert_scale),
        across(s.format.square || s.axis == Axis::kAlongK),
        down(s.format.square || s.axis == Axis::kAlongRows),
        ragged(s.kind == RowsKind::kRagged),
        transformed(is_transformed(s.format, s.axis)),
        decoded(s.decoded),
        block_offsets(v.block_offsets) {}

  /// Rows of codes; transformed ones are stored by whole blocks.
  __device__ int rows_of(const ExpertTile& tile) const { return int(code_rows_of(tile).count); }
  /// Where the rows of codes of its expert begin.
  __device__ int64_t first_code_row(const ExpertTile& tile) const {
    return block_offsets != nullptr ? block_offsets[tile.expert] : code_rows_of(tile).first;
  }
  __device__ Lines codes_of(const ExpertTile& tile) const {
    return codes.from(tile.expert, first_code_row(tile));
  }
  /// The scales of its blocks, of which each has so many codes.
  __device__ Lines scales_of(const ExpertTile& tile, int block) const {
    const bool restart = ragged && down;
    return scales.from(tile.expert,
                       restart ? first_block(tile.first, tile.expert, block) : tile.first);
  }

 private:
  /// From where those of its expert begin, as many as the tile has.
  __device__ CodeRows code_rows_of(const ExpertTile& tile) const {
    return code_rows(transformed, {tile.first, tile.rows}, tile.expert);
  }
};

}  // namespace cadre::cuda::portable
