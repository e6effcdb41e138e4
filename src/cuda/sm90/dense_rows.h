#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "cadre/dtype.h"

namespace cadre::cuda::sm90 {

// Rows and columns of a tile are those of w and of x, transposed in y, as in ragged_rows.cuh.

/// Stretches of the contraction, each summed by itself; their sums are added in their order.
constexpr int kStretches = 8;
constexpr int kDenseRows = 128, kDenseDepth = 64;     ///< of w, in a tile and in a stage
constexpr int kDenseCols = 192, kMostSplitCols = 64;  ///< rows of x in a tile, at most
constexpr int kDenseColStep = 16;
/// Clusters of a block for each stretch. So many run at once on an H200; sixteen take two turns.
constexpr int kSplitClusters = 8;

/// How many rows of x a tile has, and how many blocks share its contraction.
struct DenseTiles {
  int width, split;
};

/// A block a stretch while clusters find room for that, since then nobody waits for a long
/// contraction; else a block a tile, in as few and as full waves as there can be.
constexpr DenseTiles dense_tiles(int64_t rows, int64_t w_tiles, int units) {
  const auto width_of = [&](int64_t x_tiles) {
    const int64_t each = (rows + x_tiles - 1) / x_tiles;
    return (each + kDenseColStep - 1) / kDenseColStep * kDenseColStep;
  };
  if (w_tiles <= kSplitClusters)
    if (const int64_t width = width_of(kSplitClusters / w_tiles); width <= kMostSplitCols)
      return {int(width), kStretches};
  const int64_t fewest = (rows + kDenseCols - 1) / kDenseCols;
  const int64_t waves = (fewest * w_tiles + units - 1) / units;
  return {int(width_of(units * waves / w_tiles)), 1};
}

/// Rows of a box of w: no more than there are, since TMA takes longest for rows that are not there.
constexpr int dense_box_rows(int64_t cols) {
  return int(std::min<int64_t>((cols + 7) / 8 * 8, kDenseRows));
}

/// What the kernel of dense rows is launched with: y[r, c] = sum_d x[r, d] w[c, d].
struct DenseRowsParams {
  CUtensorMap x, w;  ///< boxes of kDenseDepth columns, of `width` and of w_rows rows
  float* y = nullptr;
  int64_t y_step = 0;  ///< from row to row
  int rows = 0, cols = 0, depth = 0;
  int w_rows = 0;            ///< of a box of w
  int width = 0, split = 1;  ///< as DenseTiles
};

/// Of bf16 or f16.
void launch_dense_rows(const DenseRowsParams&, DType, cudaStream_t);

}  // namespace cadre::cuda::sm90
