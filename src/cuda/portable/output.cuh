#pragma once
#include "cuda/portable/products.cuh"

// The epilogue: accumulators of a tile go through shared memory to the output, so that each thread
// writes chunks of eight neighbours, whatever the order of the output, its type and its alignment.
namespace cadre::cuda::portable {

/// The lines of one expert, `length` elements long.
__device__ inline Matrix matrix_of(const OutputMatrix& out, int expert, int64_t length) {
  Matrix m;
  m.data = out.of(expert);
  m.pitch = out.pitch;
  m.columns = length;
  m.dtype = out.dtype;
  return m;
}

/// The part of an output that a tile writes.
struct OutputTile {
  const OutputMatrix& out;
  const Tile& tile;

  /// Its lines, and its elements of them.
  __device__ const Range& lines() const { return out.columns ? tile.area.cols : tile.area.rows; }
  __device__ const Range& inside() const { return out.columns ? tile.area.rows : tile.area.cols; }
  __device__ Matrix matrix() const { return matrix_of(out, tile.expert, inside().last); }
};

/// Where element i of a chunk is, in rows and columns of the output.
struct ChunkPlace {
  int64_t row, col;
  bool down;  ///< the chunk runs from row to row

  __device__ int64_t row_of(int i) const { return down ? row + i : row; }
  __device__ int64_t col_of(int i) const { return down ? col : col + i; }
};

/// A whole chunk at an aligned place, or element by element to the end of the line.
__device__ inline bool is_wide(const Matrix& m, const Place& at) {
  return at.column + kChunk <= m.columns && reinterpret_cast<uintptr_t>(address(m, at)) % 16 == 0;
}
__device__ inline void load_floats(const Matrix& m, const Place& at, float (&to)[kChunk]) {
  decode(is_wide(m, at) ? load<true>(m, at) : load<false>(m, at), m.dtype, to);
}
__device__ inline void store_floats(const float (&from)[kChunk], const Matrix& m, const Place& at) {
  const Chunk chunk = encode(from, m.dtype);
  is_wide(m, at) ? store<true>(chunk, m, at) : store<false>(chunk, m, at);
}

/// Element `column` of the first line.
__device__ inline float element(const Matrix& m, int64_t column) {
  const char* at = address(m, {0, column});
  if (m.dtype == DType::kF32) return *reinterpret_cast<const float*>(at);
  return pair_of(m.dtype, *reinterpret_cast<const uint16_t*>(at)).x;
}

/// Writes the accumulators of a tile to shared memory, in the order of the output.
template <class Kind>
__device__ inline void stage_accumulators(TileShared& shared, const Products<Kind>& products,
                                          bool columns) {
  if (columns)
    products.for_each([&](int row, int col, float value) {
      shared.accumulators[col * kAccumulatorPitch + row] = value;
    });
  else
    products.for_each([&](int row, int col, float value) {
      shared.accumulators[row * kAccumulatorPitch + col] = value;
    });
  __syncthreads();
}

/// Stores them. `epilogue(values, place, at)` may change a chunk on the way: rows and columns
/// `place`, line and element `at` of the output.
template <class Epilogue>
__device__ inline void store_tile(TileShared& shared, const OutputTile& to,
                                  const Epilogue& epilogue) {
  constexpr int kChunks = kSide / kChunk;
  const Matrix lines = to.matrix();
  const bool down = to.out.columns;
#pragma unroll 1
  for (int i = int(threadIdx.x); i < kSide * kChunks; i += kTileThreads) {
    const int line = i / kChunks, chunk = i % kChunks;
    const Place at{to.lines().first + line, to.inside().first + chunk * kChunk};
    if (at.row >= to.lines().last || at.column >= to.inside().last) continue;
    float values[kChunk];
#pragma unroll
    for (int k = 0; k < kChunk; ++k)
      values[k] = shared.accumulators[line * kAccumulatorPitch + chunk * kChunk + k];
    epilogue(values,
             down ? ChunkPlace{at.column, at.row, true} : ChunkPlace{at.row, at.column, false}, at);
    store_floats(values, lines, at);
  }
  __syncthreads();
}

}  // namespace cadre::cuda::portable
