#pragma once
#include <cstdint>

#include "cuda/sm90/tuning.h"

namespace cadre::cuda::sm90 {

/// Tiles of narrow ones at most, which is about a tile for each cluster.
constexpr int64_t kTilesOfShort = 64;

/// Whether the product of one expert, as a shared one is, has so few tiles even if they are narrow.
/// Then they are: more SMs have work, and what takes time is waiting for the next stage.
constexpr bool is_short_product(int64_t rows, int experts, int64_t cols) {
  const int64_t across = (cols + kClusterRows - 1) / kClusterRows;
  return experts == 1 && (rows / kColsOfFewRows + 1) * across <= kTilesOfShort;
}

/// Whether tiles of products that neither gather nor scatter are narrow.
constexpr bool has_narrow_tiles(int64_t rows, int experts, int64_t cols) {
  return are_few_rows(rows, experts) || is_short_product(rows, experts, cols);
}

}  // namespace cadre::cuda::sm90
