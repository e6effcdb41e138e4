#pragma once
#include "cuda/gemm/roles.h"
#include "cuda/gemm/scheduler.h"
#include "cuda/sm90/output.cuh"
#include "cuda/sm90/stages.h"

// The shared memory of a kernel's block, and which warps do what: what the roles of kernel.cuh have
// in common.
namespace cadre::cuda::sm90 {

template <class Load>
constexpr bool kGathers = requires {
  typename Load::Memory;
};
template <class Load>
struct LoadMemory {};
template <class Load>
requires kGathers<Load>
struct LoadMemory<Load> : Load::Memory {
};

template <class Multiply>
constexpr bool kHasMemory = requires {
  typename Multiply::Memory;
};
template <class Multiply>
struct MultiplyMemory {};
template <class Multiply>
requires kHasMemory<Multiply>
struct MultiplyMemory<Multiply> : Multiply::Memory {
};

template <class Store>
constexpr bool kScatters = requires(Store& store) {
  store.find_rows(0);
};

template <class Kernel>
struct alignas(1024) Shared {
  static constexpr Tile kTile = Kernel::kTile;
  static constexpr OutputShape kShape = Kernel::Store::kShape;
  static_assert(kShape.one_ring || kTile.consumers == kConsumers);  // else rings are of two

  Stages<kTile> stages;
  uint8_t output[kShape.rings()][kShape.buffers][kShape.part_bytes()];
  Barrier stage_full[kTile.stages], stage_empty[kTile.stages];
  Barrier output_empty[kTile.consumers][kShape.buffers],
      output_full[kShape.rings()][kShape.buffers];
  gemm::TileRing<kTile.records, kCluster> tiles;
  [[no_unique_address]] StageScales<kTile> scales;
  [[no_unique_address]] typename Kernel::Store::Memory of_store;
  [[no_unique_address]] LoadMemory<typename Kernel::Load> of_load;
  [[no_unique_address]] MultiplyMemory<typename Kernel::Multiply> of_multiply;

  __device__ StageRing<kTile> stage_ring() { return {stages, stage_full, stage_empty, scales}; }
  __device__ OutputRing<kShape> output_ring(int ring) { return {output[ring], output_full[ring]}; }
};

template <class Kernel>
constexpr gemm::Roles kRoles = {.consumers = Kernel::kTile.consumers,
                                .load_warps = Kernel::Load::kWarps,
                                .store_warps = Kernel::Store::kShape.store_warps(),
                                .consumer_registers = Kernel::Multiply::kRegisters,
                                .producer_registers = Kernel::kTile.producer_registers(),
                                .store_lanes = kScatters<typename Kernel::Store> ? kWarp : 1};

template <class Kernel>
__device__ inline void init_barriers(Shared<Kernel>& shared) {
  constexpr int kWarpsOfConsumer = kWarpgroup / kWarp;
  if (threadIdx.x == 0) {
    for (Barrier& full : shared.stage_full) init(full, Kernel::Load::kArrivals);
    for (Barrier& empty : shared.stage_empty)
      init(empty, kCluster * Kernel::kTile.consumers * kWarpsOfConsumer);
    for (auto& ring : shared.output_empty)
      for (Barrier& empty : ring) init(empty, 1);
    for (auto& ring : shared.output_full)
      for (Barrier& full : ring) init(full, kWarpsOfConsumer);
    shared.tiles.init_barriers(kRoles<Kernel>.readers());
    fence_mbarrier_init();
  }
  __syncthreads();
  cluster_sync();
}

}  // namespace cadre::cuda::sm90
