#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "cpu/quantized_expert.h"

namespace cadre::cpu {

constexpr int64_t kWorthThreads = 1 << 16;  ///< elements; below, waking threads takes longer

/// How a tensor is cut: tiles of `height` rows of one expert and `width` columns. The height is a
/// multiple of every block that runs along rows.
struct Grid {
  QuantizedShape shape;  ///< of any copy; they agree in rows, columns and experts
  Offsets offsets;
  int64_t height, width;
};

/// Calls `work(expert, rows of the expert, row, col)` for every tile, each on one of all threads.
template <class Work>
void for_each_tile(const Grid& grid, Work&& work) {
  const int64_t across = ceil_div(grid.shape.cols, grid.width);
  const auto tiles_of = [&](schedule::ExpertRows rows) {
    return ceil_div(rows.count(), grid.height) * across;
  };
  int64_t total = 0;
  for_each_expert(grid.shape, grid.offsets,
                  [&](int, schedule::ExpertRows rows) { total += tiles_of(rows); });
  const int64_t elements = total * grid.height * std::min(grid.width, grid.shape.cols);
#pragma omp parallel if (total > 1 && elements >= kWorthThreads)
  {
    const int64_t me = omp_get_thread_num(), threads = omp_get_num_threads();
    const int64_t begin = total * me / threads, end = total * (me + 1) / threads;
    int64_t before = 0;
    for_each_expert(grid.shape, grid.offsets, [&](int expert, schedule::ExpertRows rows) {
      const int64_t tiles = tiles_of(rows);
      for (int64_t t = std::max<int64_t>(begin - before, 0); t < std::min(end - before, tiles); ++t)
        work(expert, rows, t / across * grid.height, t % across * grid.width);
      before += tiles;
    });
  }
}

}  // namespace cadre::cpu
