#pragma once
#include <omp.h>

#include <atomic>

#include "cpu/gemm/arena.h"
#include "cpu/gemm/first_error.h"
#include "cpu/gemm/lines.h"
#include "cpu/gemm/means.h"
#include "cpu/gemm/tile_walk.h"

namespace cadre::cpu::gemm {

/// A tile with the rows of its expert.
struct DrawnTile {
  OutTile tile;
  schedule::ExpertRows rows;
};

/// Calls `work` for a thread's share of the tiles, with the tile after it or null; `drawn` is
/// common to all threads.
template <class Work>
void for_my_tiles(TileWalk walk, std::atomic<int64_t>& drawn, Work&& work) {
  DrawnTile now, next;
  bool any = false;
  int64_t mine = drawn++;
  for (int64_t number = 0; walk.next(); ++number) {
    if (number != mine) continue;
    next = {walk.tile(), walk.rows()};
    if (any) work(now, &next);
    now = next, any = true;
    mine = drawn++;
  }
  if (any) work(now, nullptr);
}

/// Bytes of all threads' scratch; `place(Arena&)` takes that of one.
template <class Place>
int64_t scratch_bytes(const Means& means, Place&& place) {
  Arena arena(nullptr);
  for (int t = 0; t < means.threads; ++t) place(arena);
  return arena.used();
}

/// Does every tile, on one of the threads. Each begins with `start(place(arena))`, which returns
/// what for_my_tiles calls. Throws the first of what they threw.
template <class Place, class Start>
void run_tiles(const TileWalk& walk, const Means& means, Workspace workspace, Place&& place,
               Start&& start) {
  std::atomic<int64_t> drawn = 0;
  FirstError error;
#pragma omp parallel num_threads(means.threads)
  {
    error.guard([&] {
      Arena arena(workspace.data);
      for (int t = 0; t < omp_get_thread_num(); ++t) place(arena);
      const auto scratch = place(arena);
      for_my_tiles(walk, drawn, start(scratch));
    });
    end_stream();
  }
  error.rethrow();
}

}  // namespace cadre::cpu::gemm
