#pragma once
#include <cstdint>

#include "cuda/device/barrier.h"
#include "cuda/gemm/cursor.h"
#include "cuda/gemm/roles.h"
#include "cuda/gemm/tile_record.h"

// How the roles of a persistent block learn of their tiles: one thread, the scheduler, takes the
// number of a tile and publishes its record, once it or its warp has found the tile, in a small
// ring in shared memory.
namespace cadre::cuda::gemm {

/// The ring of records, in shared memory.
///
///   barrier         arrivals   who arrives              who waits      guards
///   tile_full[r]    1          scheduler                the readers    record r describes a tile
///   tile_empty[r]   readers    every reader             scheduler      r may be overwritten
///   tile_wanted     1          a load warp              scheduler      a tile should be taken
///   number_wanted   blocks-1   the others' schedulers   the first's    they wait for a number
///   number_full     1          itself, and the bytes    the others'    the number has arrived
template <int kRecords, int kBlocks>
struct TileRing {
  Barrier tile_full[kRecords], tile_empty[kRecords];
  Barrier tile_wanted, number_wanted, number_full;
  TileRecord records[kRecords];
  int64_t number;  ///< of the next tile, as the first block of the cluster sent it

  __device__ void init_barriers(int readers) {
    for (int r = 0; r < kRecords; ++r) init(tile_full[r], 1), init(tile_empty[r], readers);
    init(tile_wanted, 1), init(number_wanted, kBlocks - 1), init(number_full, 1);
  }
};

/// A role's side of the ring.
template <int kRecords, int kBlocks>
class TileReader {
 public:
  __device__ explicit TileReader(TileRing<kRecords, kBlocks>& ring) : ring_(ring) {}

  /// The next tile, for a role of one thread.
  __device__ TileRecord next() {
    wait_asleep(ring_.tile_full[at_.at], at_.parity);
    return take();
  }
  /// For a whole warp, which has nothing else to do.
  __device__ TileRecord next_in_warp() { return uniform(next()); }
  /// For a warp of a consumer, which is late if it waits at all.
  __device__ TileRecord next_in_consumer() {
    wait(ring_.tile_full[at_.at], at_.parity);
    return uniform(take());
  }

 private:
  __device__ TileRecord take() {
    const TileRecord tile = ring_.records[at_.at];
    arrive(ring_.tile_empty[at_.at]);
    at_.next();
    return tile;
  }

  TileRing<kRecords, kBlocks>& ring_;
  Cursor<kRecords> at_;
};

/// The scheduler's side: takes numbers of tiles, and publishes the tiles.
template <int kRecords, int kBlocks>
class Scheduler {
 public:
  /// All clusters count up `taken`, which begins as zero; without it, each takes every
  /// gridDim.x / kBlocks-th tile.
  __device__ Scheduler(TileRing<kRecords, kBlocks>& ring, unsigned long long* taken)
      : ring_(ring), taken_(taken), number_(int(blockIdx.x / kBlocks) - clusters()) {}

  /// The number of the cluster's next tile, once a load warp wants one and a record is empty. The
  /// first block counts, and sends the number to the others when they wait for it. kDealsFirst: a
  /// cluster's first tile is not counted, so that nobody waits for the count then; but that tile
  /// waits for its cluster.
  template <bool kDealsFirst>
  __device__ int64_t next_number() {
    wait_asleep(ring_.tile_empty[at_.at], at_.parity ^ 1);
    wait_asleep(ring_.tile_wanted, wanted_parity_);
    if (taken_ == nullptr || (kDealsFirst && !has_first_)) {
      has_first_ = true;
      return number_ += clusters();
    }
    const uint32_t parity = number_parity_;
    number_parity_ ^= 1;
    if (cluster_ctarank() != 0) {
      arrive_expect_tx(ring_.number_full, sizeof(ring_.number));
      arrive_cluster(ring_.number_wanted, 0);
      wait_asleep(ring_.number_full, parity);
      return ring_.number;
    }
    const int64_t number = (kDealsFirst ? clusters() : 0) + int64_t(atomicAdd(taken_, 1ull));
    wait_asleep(ring_.number_wanted, parity);
    for (uint32_t block = 1; block < kBlocks; ++block)
      st_async(ring_.number, number, ring_.number_full, block);
    return number;
  }
  /// Once for a number at most.
  __device__ void publish(const TileRecord& tile) {
    ring_.records[at_.at] = tile;
    arrive(ring_.tile_full[at_.at]);
    at_.next();
    wanted_parity_ ^= 1;
  }

 private:
  __device__ static int clusters() { return int(gridDim.x / kBlocks); }

  TileRing<kRecords, kBlocks>& ring_;
  unsigned long long* taken_;
  int64_t number_;
  bool has_first_ = false;
  Cursor<kRecords> at_;
  uint32_t number_parity_ = 0, wanted_parity_ = 1;
};

}  // namespace cadre::cuda::gemm
