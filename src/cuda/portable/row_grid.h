#pragma once
#include <algorithm>
#include <cstdint>

#include "cuda/device/chunk.h"
#include "cuda/portable/launch.h"

// A grid over the rows of a matrix in which each warp takes a segment of one row, some chunks a
// thread, or a whole row where its elements are summed. Segments of a row are adjacent in a block;
// a grid-stride loop covers the rows beyond the grid.
namespace cadre::cuda::portable {

constexpr int kRound = kChunk * kLanes;  // columns of a warp at a time
constexpr int kWholeRows = 0;
constexpr int kGridWarps = 8;
constexpr int kMostBlocksAlongRows = 65535;  // CUDA's limit of gridDim.y

struct RowGrid {
  dim3 blocks, threads;

  /// For kernels that call begin_dependent().
  Grid on(cudaStream_t stream) const {
    return {.blocks = blocks, .threads = threads, .stream = stream, .dependent = true};
  }

  /// `rounds`: chunks a thread; at most so many segments of a row in a block, a power of two. Of at
  /// least one block, even for no rows.
  static RowGrid of(int64_t rows, int64_t columns, int rounds, int most_across = kGridWarps) {
    const int64_t segment = rounds == kWholeRows ? columns : int64_t(rounds) * kRound;
    const int64_t segments = (columns + segment - 1) / segment;
    int across = 1;
    while (across < most_across && across < segments) across *= 2;
    // Fewer where warps without a segment would be more than a quarter of those that have one.
    while (across > 1 && 4 * ((segments + across - 1) / across * across - segments) > segments)
      across /= 2;
    const int down = kGridWarps / across;
    const int64_t blocks = std::clamp<int64_t>((rows + down - 1) / down, 1, kMostBlocksAlongRows);
    return {dim3(unsigned((segments + across - 1) / across), unsigned(blocks)),
            dim3(kLanes, unsigned(across), unsigned(down))};
  }
  /// Where a block takes a segment, of so many beside each other.
  static RowGrid of_blocks(int64_t rows, int64_t segments, int threads) {
    const int64_t down = std::clamp<int64_t>(rows, 1, kMostBlocksAlongRows);
    return {dim3(unsigned(segments), unsigned(down)), dim3(unsigned(threads))};
  }
};

/// A grid over rows of so few columns that a thread takes one, for kernels that call
/// begin_dependent(), and its loop.
constexpr int64_t kNarrow = kChunk;
constexpr unsigned kNarrowThreads = 256;
inline Grid narrow_grid(int64_t rows, cudaStream_t stream) {
  const int64_t blocks = (rows + kNarrowThreads - 1) / kNarrowThreads;
  return {.blocks = unsigned(std::clamp<int64_t>(blocks, 1, kMostBlocksAlongRows)),
          .threads = kNarrowThreads,
          .stream = stream,
          .dependent = true};
}
template <class Work>
__device__ void for_narrow_rows(int64_t rows, Work&& work) {
  const int64_t first = int64_t(blockIdx.x) * kNarrowThreads + threadIdx.x;
  for (int64_t row = first; row < rows; row += int64_t(gridDim.x) * kNarrowThreads) work(row);
}

/// A grid-stride loop: calls work(row) with every row below `rows` that this warp takes.
template <class Work>
__device__ void for_rows(int64_t rows, Work&& work) {
  const int64_t first = int64_t(blockIdx.y) * blockDim.z + threadIdx.z;
  for (int64_t row = first; row < rows; row += int64_t(gridDim.y) * blockDim.z) work(row);
}

/// The segment of this warp.
__device__ inline int64_t segment_index() { return int64_t(blockIdx.x) * blockDim.y + threadIdx.y; }

/// The first column of this thread, in segments of so many rounds.
__device__ inline int64_t first_column(int rounds) {
  return segment_index() * rounds * kRound + threadIdx.x * kChunk;
}

/// Calls work(column) with the first column of every chunk of this thread in a whole row.
template <class Work>
__device__ void for_chunks(int64_t columns, Work&& work) {
  for (int64_t column = first_column(kWholeRows); column < columns; column += kRound) work(column);
}

}  // namespace cadre::cuda::portable
