#pragma once
#include "cuda/device/barrier.h"
#include "cuda/gemm/cursor.h"
#include "cuda/sm90/tile.h"

// Stages of operands in shared memory, and the ring in which the roles of a block pass them on.
namespace cadre::cuda::sm90 {

using gemm::Cursor;

/// Scales that come with the stages, where a tile has them.
template <Tile kTile>
struct StageScales {
  __device__ float* of(int) { return nullptr; }
};
template <Tile kTile>
requires(kTile.scales != 0) struct StageScales<kTile> {
  alignas(16) float scales[kTile.stages][kTile.scales];

  __device__ float* of(int stage) { return scales[stage]; }
};

/// The stages in shared memory, and one of them: what one round of loads brings.
template <Tile kTile>
struct Stages {
  uint8_t a[kTile.stages][kTile.a_bytes()];
  uint8_t b[kTile.stages][kTile.b_bytes()];
};
struct Stage {
  uint8_t *a, *b;
  float* scales;  ///< of the tile's rows, as they lie in memory; null: there are none
};

/// A role's place in the ring of stages.
template <Tile kTile>
struct StageRing {
  Stages<kTile>& stages;
  Barrier (&full)[kTile.stages];
  Barrier (&empty)[kTile.stages];
  StageScales<kTile>& scales;
  Cursor<kTile.stages> at{};

  __device__ Stage stage() const { return {stages.a[at.at], stages.b[at.at], scales.of(at.at)}; }
  __device__ void wait_full() const { wait(full[at.at], at.parity); }
  __device__ void wait_empty() const { wait_asleep(empty[at.at], at.parity ^ 1); }
  /// Frees a stage in both blocks, since either loads into both.
  __device__ void release(int stage) const {
    const uint32_t lane = threadIdx.x % kWarp;
    if (lane < kCluster) arrive_cluster(empty[stage], lane);
  }
};

}  // namespace cadre::cuda::sm90
