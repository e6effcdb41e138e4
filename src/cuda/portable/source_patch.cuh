#pragma once
#include "cuda/device/magnitude.h"
#include "cuda/portable/quantize_job.h"
#include "formats/hadamard.h"

// What a thread that quantises has of a tile: a patch of eight rows and a chunk of eight columns,
// in registers. Neighbouring lanes have neighbouring chunks, so that what blocks of a format have
// in common is in few lanes.
namespace cadre::cuda::portable {

constexpr int kPatchRows = kChunk;

/// A thread's place in a strip of tiles, if a warp has so many chunks side by side.
template <int kLanesAcross>
struct Patch {
  static constexpr int kLanesDown = kLanes / kLanesAcross, kWarpsAcross = kAcross / kLanesAcross;

  int row, chunk;

  __device__ int col() const { return chunk * kChunk; }
  /// In the tile that begins with a column of the strip.
  __device__ static Patch of_thread(int column) {
    const int warp = int(threadIdx.x) / kLanes, lane = int(threadIdx.x) % kLanes;
    const int down = warp / kWarpsAcross * kLanesDown + lane / kLanesAcross;
    return {down * kPatchRows,
            column / kChunk + warp % kWarpsAcross * kLanesAcross + lane % kLanesAcross};
  }
};

/// The chunks of a patch, as they are stored; what is not there is zero.
struct SourcePatch {
  Chunk rows[kPatchRows];
};

/// Where a patch begins in a strip, and how much of it is there.
struct PatchPlace {
  int row, col;    ///< in the strip
  int rows, cols;  ///< none where the other has none

  template <int kLanesAcross>
  __device__ PatchPlace(Patch<kLanesAcross> patch, int tile_rows, int tile_cols)
      : row(patch.row), col(patch.col()) {
    const bool some = tile_rows > row && tile_cols > col;
    rows = some ? min(tile_rows - row, kPatchRows) : 0;
    cols = some ? min(tile_cols - col, kChunk) : 0;
  }
};

/// A wide chunk of a row.
template <DType kSource>
__device__ void load_wide(Chunk& chunk, const char* from) {
  chunk.low = reinterpret_cast<const uint4*>(from)[0];
  if (kSource == DType::kF32) chunk.high = reinterpret_cast<const uint4*>(from)[1];
}

/// The one place where tiles of a source are read. A row that is gathered and whose slot is none is
/// zero. Wide chunks are all asked for before one of them is waited for, and so are slots.
template <DType kSource>
__device__ SourcePatch load_patch(const QuantizeJob& job, const ExpertTile& tile, PatchPlace at) {
  constexpr int kBytes = kSource == DType::kF32 ? 4 : 2;
  const Matrix from = job.source.of(tile.expert);
  const int64_t row = tile.first + tile.row + at.row, col = tile.col + at.col;
  const char* first = from.data + col * kBytes;
  SourcePatch patch = {};
  if (!job.tokens.gather() && from.is_wide()) {
    first += row * from.pitch;
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i, first += from.pitch)
      if (i < at.rows) load_wide<kSource>(patch.rows[i], first);
    return patch;
  }
  int source[kPatchRows];
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    source[i] = -1;
    if (i < at.rows) source[i] = job.tokens.gather() ? job.tokens.token_of(row + i) : int(row) + i;
  }
  if (from.is_wide()) {
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i)
      if (source[i] >= 0) load_wide<kSource>(patch.rows[i], first + source[i] * from.pitch);
    return patch;
  }
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i)
    if (source[i] >= 0) patch.rows[i] = load<false>(from, {source[i], col});
  return patch;
}

/// Element k of a chunk.
__device__ inline float element_of(const Chunk& chunk, DType dtype, int k) {
  if (dtype == DType::kF32) return __uint_as_float(word(chunk, k));
  const float2 both = pair_of(dtype, word(chunk, k / 2));
  return k % 2 == 0 ? both.x : both.y;
}

/// The largest magnitudes of the columns of a patch, and of all of it.
template <DType kSource>
__device__ LineMagnitudes<kSource> columns_of(const SourcePatch& patch) {
  LineMagnitudes<kSource> columns(patch.rows[0]);
#pragma unroll
  for (int i = 1; i < kPatchRows; ++i) columns.add(patch.rows[i]);
  return columns;
}
template <DType kSource>
__device__ uint32_t largest_of(const SourcePatch& patch) {
  return columns_of<kSource>(patch).of_all();
}

/// Transforms every sixteen rows, to bf16: those of a thread and of the one `kLanesAcross` lanes
/// from it.
template <DType kSource, int kLanesAcross>
__device__ void transform(SourcePatch& patch) {
  using formats::Hadamard16;
  const bool second = threadIdx.x / kLanesAcross % 2 != 0;  // has the last eight points
  const float one = second ? -1.0f : 1.0f;                  // of the last difference
  const uint32_t negative = Hadamard16::kNegative >> (second ? kPatchRows : 0);
#pragma unroll
  for (int pair = 0; pair < kChunk / 2; ++pair) {
    float v[2][kPatchRows];
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      const uint32_t sign = (negative >> i & 1) << 31;
      const auto bits = [&](int c) {
        return __float_as_uint(element_of(patch.rows[i], kSource, 2 * pair + c));
      };
      // A sum changes the sign too, of bf16 in the instruction that shifts it.
      v[0][i] = __uint_as_float(bits(0) + sign);
      v[1][i] = __uint_as_float(bits(1) ^ sign);
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      Hadamard16::add_pairs<kPatchRows>(v[c]);
#pragma unroll
      for (int i = 0; i < kPatchRows; ++i) {
        const float other = __shfl_xor_sync(~0u, v[c][i], kLanesAcross);
        v[c][i] = formats::mul(formats::fma(v[c][i], one, other), 0.25f);
      }
    }
    // In place: words up to this one have been read.
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      const uint32_t both = bits_of_pair(DType::kBf16, v[0][i], v[1][i]);
      uint4& to = patch.rows[i].low;
      (pair == 0 ? to.x : pair == 1 ? to.y : pair == 2 ? to.z : to.w) = both;
    }
  }
}

}  // namespace cadre::cuda::portable
