#pragma once
#include <algorithm>
#include <cstdint>

#include "cadre/quantize.h"
#include "cuda/device/chunk.h"
#include "cuda/device/scan.h"
#include "cuda/portable/launch.h"
#include "schedule/expert_rows.h"

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
  int expert;
  int first;       ///< of the expert's rows in the batch; 0 for weights
  int row, col;    ///< of the tile's first element, within the expert
  int rows, cols;  ///< that are there
};

/// The strips of a block, one after the other. It looks at many experts at once; then each thread
/// finds the strip by itself, and no warp waits for another. What a thread knows of its strip lies
/// in shared memory, since a patch leaves no registers for it.
class StripQueue {
 public:
  /// By all threads of the block, as next().
  __device__ void start(const ExpertsRows& all) {
    mine().number = blockIdx.x;
    if (threadIdx.x == 0) window_ = -kWindow, upto_[kWindow - 1] = 0;
    if (threadIdx.x == 0 && all.offsets != nullptr) ends_[kWindow] = clamped(all, all.offsets[0]);
    __syncthreads();
  }
  /// Finds the next strip; false behind the last one. Numbers of strips have 32 bits: a strip has
  /// 128 columns or more.
  __device__ bool next(const ExpertsRows& all) {
    const uint32_t number = mine().number, strip_cols = all.strip;
    const uint32_t across = (uint32_t(all.cols) + strip_cols - 1) / strip_cols;
    ExpertTile found = {};
    uint32_t index = number;
    int rows = int(all.rows);
    if (all.offsets == nullptr) {
      const uint32_t each = uint32_t(all.down()) * across;
      if (number >= each * uint32_t(all.experts)) return false;
      found.expert = int(number / each);
      index = number % each;
    } else {
      while (number >= upto_[kWindow - 1]) {
        if (window_ + kWindow >= all.experts) return false;
        look(all, across);
      }
      const int i = first_beyond(number);
      found.expert = window_ + i;
      found.first = ends_[i];
      rows = ends_[i + 1] - ends_[i];
      index = number - (i == 0 ? before_ : upto_[i - 1]);
    }
    found.row = int(index / across) * kTileSide;
    found.col = int(index % across) * all.strip;
    found.rows = min(rows - found.row, kTileSide);
    found.cols = min(int(all.cols) - found.col, all.strip);
    mine() = {found, number + gridDim.x};
    return true;
  }
  /// Until the thread asks for the next one.
  __device__ const ExpertTile& strip() { return mine().tile; }

 private:
  static constexpr int kWindow = 128;  ///< experts: no more than a block has threads
  struct OfThread {
    ExpertTile tile;
    uint32_t number;  ///< of the next strip
  };

  __device__ OfThread& mine() { return of_thread_[threadIdx.x]; }
  __device__ static int clamped(const ExpertsRows& all, int offset) {
    const int64_t used = schedule::rows_used(all.offsets, all.experts, all.rows);
    return int(schedule::clamp_row(offset, 0, used));
  }
  /// Moves on to the next experts, each beginning where the one before ended or later.
  __device__ void look(const ExpertsRows& all, uint32_t across) {
    __syncthreads();
    const int i = int(threadIdx.x), expert = window_ + kWindow + i;
    const int begin = ends_[kWindow];
    const uint32_t before = upto_[kWindow - 1];
    const bool is_there = i < kWindow && expert < all.experts;
    const int end = is_there ? clamped(all, all.offsets[expert + 1]) : 0;
    const int last = max(begin, int(block_scan(end, partial_, Largest()).upto));
    if (i < kWindow) ends_[i + 1] = last;
    if (i == 0) ends_[0] = begin, window_ += kWindow, before_ = before;
    __syncthreads();
    const int rows = i < kWindow ? ends_[i + 1] - ends_[i] : 0;
    const int64_t strips = int64_t((rows + kTileSide - 1) / kTileSide) * across;
    const int64_t upto = block_scan(strips, partial_, Sum()).upto;
    if (i < kWindow) upto_[i] = before + uint32_t(upto);
    __syncthreads();
  }
  /// The first expert of the window that has a strip behind that number.
  __device__ int first_beyond(uint32_t number) const {
    int first = 0;
#pragma unroll
    for (int step = kWindow / 2; step > 0; step /= 2)
      if (upto_[first + step - 1] <= number) first += step;
    return first;
  }

  int window_;              ///< the first expert of those that were looked at
  uint32_t before_;         ///< strips before them
  uint32_t upto_[kWindow];  ///< strips up to and with each of them
  int ends_[kWindow + 1];   ///< where each begins, and where the last one ends
  int64_t partial_[32];     ///< of scans
  OfThread of_thread_[kQuantizeThreads];
};

/// Calls work(strip, column) for every tile of a block, by all of its threads, with the first
/// column of the tile in its strip.
template <class Work>
__device__ void walk_tiles(const ExpertsRows& all, StripQueue& queue, Work&& work) {
  for (queue.start(all); queue.next(all);) {
    const ExpertTile& strip = queue.strip();
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
