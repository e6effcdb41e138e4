#pragma once
#include <algorithm>
#include <bit>

#include "cuda/device/small_float.h"
#include "cuda/portable/source_tile.cuh"
#include "formats/list.h"

// What a thread that quantises has of a tile: its elements, the numbers of the blocks that they are
// in, and where their codes go, or their numbers in a decoded copy.
namespace cadre::cuda::portable {

/// The blocks of a tile of one copy, and where in shared memory what belongs to each lies: columns
/// that neighbouring threads take at the same time lie side by side.
template <int kBlock>
struct TileBlocks {
  static constexpr int kMost = kTileSide * kTileSide / kBlock;
  static constexpr int kSideBits = std::countr_zero(unsigned(kTileSide));
  static constexpr int kBlockBits = std::countr_zero(unsigned(kBlock));
  bool across, down;

  explicit __device__ TileBlocks(const QuantizedMatrix& m) : across(m.across), down(m.down) {}

  __device__ int row_bits() const { return down ? kSideBits - kBlockBits : kSideBits; }
  __device__ int col_bits() const { return across ? kSideBits - kBlockBits : kSideBits; }
  __device__ int block_row(int row) const { return down ? row / kBlock : row; }
  __device__ int block_col(int col) const { return across ? col / kBlock : col; }
  __device__ int place(int row, int col) const {
    return (row << col_bits()) + (across ? col : col % kChunk * kAcross + col / kChunk);
  }
  /// The block of an element.
  __device__ int of(int row, int col) const { return place(block_row(row), block_col(col)); }
};

/// Formats without blocks have the blocks of a tile, which nobody looks at; of whole lines a tile
/// has parts.
template <class Row>
constexpr int kBlockOf = Row::kInfo.block == 0 ? kTileSide : std::min(Row::kInfo.block, kTileSide);

/// What a thread takes of a tile: eight rows, and eight columns in one chunk.
struct Patch {
  int row, chunk;

  __device__ int col() const { return chunk * kChunk; }
  /// Where chunk i is. Eight rows have one swizzle.
  __device__ int place(int i) const { return source_place(row, chunk) + i * kAcross; }
  /// Neighbours take chunks of a row: reads and row-major writes are coalesced.
  __device__ static Patch along_row() {
    return {int(threadIdx.x / kAcross) * kChunk, int(threadIdx.x % kAcross)};
  }
  /// Neighbours take rows of a chunk: column-major codes are.
  __device__ static Patch down_column() {
    return {int(threadIdx.x % kAcross) * kChunk, int(threadIdx.x / kAcross)};
  }
};

/// What the elements of a thread's patch are multiplied by: so many words of shared memory, one a
/// block, or one number where a format has none.
template <class Row>
class BlockFactors {
 public:
  __device__ BlockFactors(const uint32_t* shared, const QuantizedMatrix& to, Patch patch,
                          float whole)
      : whole_(whole) {
    if constexpr (!kNone) {
      const TileBlocks<kBlockOf<Row>> blocks(to);
      first_ = shared + blocks.of(patch.row, patch.col());
      row_step_ = blocks.down ? 0 : 1 << blocks.col_bits();
      column_step_ = blocks.across ? 0 : kAcross;
    }
  }
  /// Of element [i, k] of the patch.
  __device__ float at(int i, int k) const {
    return kNone ? whole_ : __uint_as_float(first_[i * row_step_ + k * column_step_]);
  }
  __device__ bool by_row() const { return kNone || row_step_ != 0; }

 private:
  static constexpr bool kNone = Row::kInfo.block == 0;
  const uint32_t* first_ = nullptr;
  int row_step_ = 0, column_step_ = 0;
  float whole_;
};

/// Where the codes of a thread's patch go; what lies beyond the tile's end does not.
struct PatchCodes {
  uint8_t* first;  ///< code
  int64_t pitch;   ///< bytes from line to line
  bool columns;    ///< lines are columns
  Patch patch;
  int rows, cols;  ///< that are there

  __device__ PatchCodes(const QuantizedMatrix& to, const ExpertTile& tile)
      : pitch(to.codes.pitch),
        columns(to.codes.columns),
        patch(columns ? Patch::down_column() : Patch::along_row()),
        rows(to.rows_of(tile) - patch.row),
        cols(tile.cols - patch.col()) {
    first = to.codes_of(tile).at(tile.row + patch.row, tile.col + patch.col());
  }
  __device__ bool is_empty() const { return rows <= 0 || cols <= 0; }
  template <class Element>
  __device__ void store_line(int line, const EightCodes<Element>& codes) const {
    if (line < (columns ? cols : rows))
      store_codes(first + line * pitch, codes, columns ? rows : cols);
  }
};

/// Where the numbers of a thread's patch go, of a decoded copy.
template <class Row>
struct PatchNumbers {
  static constexpr bool columns = false;
  Patch patch = Patch::along_row();
  Matrix out;
  int rows;  ///< that are there
  BlockFactors<Row> scales;

  __device__ PatchNumbers(const QuantizedMatrix& to, const ExpertTile& tile, const uint32_t* shared)
      : rows(to.rows_of(tile) - patch.row), scales(shared, to, patch, 1.0f) {
    const PatchCodes place(to, tile);
    out.data = reinterpret_cast<char*>(place.first);
    out.pitch = place.pitch;
    out.columns = place.cols;
    out.dtype = to.codes.bits == 32 ? DType::kF32 : DType::kBf16;
  }
  __device__ bool is_empty() const { return rows <= 0 || out.columns <= 0; }
  /// Codes times scales.
  template <class Element>
  __device__ void store_line(int i, const EightCodes<Element>& codes) const {
    if (i >= rows) return;
    float x[kChunk];
    decode_codes(codes, x);
    for (int k = 0; k < kChunk; ++k) x[k] = formats::mul(x[k], scales.at(i, k));
    const Chunk chunk = encode(x, out.dtype);
    const bool aligned = (reinterpret_cast<uintptr_t>(out.data) | out.pitch) % 16 == 0;
    aligned&& out.columns >= kChunk ? store<true>(chunk, out, {i, 0})
                                    : store_narrow(chunk, out, {i, 0});
  }
};

}  // namespace cadre::cuda::portable
