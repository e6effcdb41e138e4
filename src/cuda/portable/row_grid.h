#pragma once
#include <algorithm>
#include <cstdint>

#include "cuda/device/chunk.h"
#include "cuda/portable/launch.h"

// A grid over the rows of a matrix in which each warp takes a segment of one row: a chunk a thread,
// or a whole row where its elements are summed. Segments of a row are neighbours in a block; rows
// that are more than a grid holds are walked.
namespace cadre::cuda::portable {

constexpr int kSegment = kChunk * kLanes;  // columns
constexpr int kGridWarps = 8;
constexpr int kMostBlocksAlongRows = 65535;  // of what CUDA allows in y

struct RowGrid {
  dim3 blocks, threads;

  /// Of at least one block, even for no rows.
  static RowGrid of(int64_t rows, int64_t columns, bool whole_rows) {
    const int64_t segments = whole_rows ? 1 : (columns + kSegment - 1) / kSegment;
    int across = 1;
    while (across < kGridWarps && across < segments) across *= 2;
    const int down = kGridWarps / across;
    const int64_t blocks = std::clamp<int64_t>((rows + down - 1) / down, 1, kMostBlocksAlongRows);
    return {dim3(unsigned((segments + across - 1) / across), unsigned(blocks)),
            dim3(kLanes, unsigned(across), unsigned(down))};
  }
};

/// Calls work(row) with every row below `rows` that this warp takes.
template <class Work>
__device__ void for_rows(int64_t rows, Work&& work) {
  const int64_t first = int64_t(blockIdx.y) * blockDim.z + threadIdx.z;
  for (int64_t row = first; row < rows; row += int64_t(gridDim.y) * blockDim.z) work(row);
}

/// The segment of this warp.
__device__ inline int64_t segment_index() {
  return int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
}

/// Calls work(column) with the first column of every chunk of this thread: one of its segment, or
/// all that go round to it where warps take whole rows.
template <class Work>
__device__ void for_chunks(int64_t columns, bool whole_rows, Work&& work) {
  const int64_t step = whole_rows ? kSegment : columns;
  const int64_t first = segment_index() * kSegment + threadIdx.x * kChunk;
  for (int64_t column = first; column < columns; column += step) work(column);
}

}  // namespace cadre::cuda::portable
