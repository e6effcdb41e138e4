#pragma once
#include "cuda/device/copy.h"
#include "cuda/device/launch.h"
#include "cuda/device/matrices.h"
#include "cuda/device/wgmma.h"
#include "cuda/sm90/tuning.h"

// What the grouped GEMM kernels of Hopper share: the shape of a tile, its shared memory, and the
// ring of stages between the warps that load and the warps that multiply. Two blocks, a cluster,
// work on neighbouring tiles with the same second operand: each loads half of it for both.
//
//   role        warps   work
//   producer    1       starts all loads of operands
//   carriers    1 or 2  one thread a ring: stores of output, and loads of old output
//   scheduler   1       one thread: finds tiles and tells the others of them
//   consumer 0  4       rows 0 to 63 of a tile: products, then the output
//   consumer 1  4       rows 64 to 127
//
//   barrier     count   who arrives                      who waits    guards
//   full[s]     1       producer, and the bytes          consumers    stage s holds both operands
//   empty[s]    16      consumers' warps, both blocks    producer     stage s may be overwritten
//   told[r]     1       scheduler                        the others   record r describes a tile
//   heard[r]    289, 290   the others' threads           scheduler    record r may be overwritten
//   free[c][b]  1       carrier, and the bytes           consumer c   buffer b may be written
//   done[.][b]  4       warps of a consumer              carrier      buffer b holds output
namespace cadre::cuda::sm90 {

constexpr int kConsumers = 2;    // warpgroups that multiply
constexpr int kWarpgroup = 128;  // threads
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kRows = 128;                            // of a tile: 64 a consumer
constexpr int kDepth = 64;                            // of a stage
constexpr int kSlab = kDepth * 128;                   // bytes of 64 elements across, of a stage
constexpr uint16_t kAllBlocks = (1 << kCluster) - 1;  // of a cluster, one bit each

/// The shape of a tile, and how its operands lie.
struct Tile {
  int cols = kMostCols;  ///< at most
  int part_cols = 64;    ///< of the output, in one store
  int parts = 4;         ///< of a buffer
  int stages = kStages;
  /// Consumers take turns with one buffer for the output; else each has a ring of buffers.
  bool turns = true;
  int buffers = 1;                      ///< of a ring
  bool a_along = true, b_along = true;  ///< rows of memory run along the contraction
  bool ragged_depth = false;            ///< the contraction ends anywhere in a stage
  Element element = Element::kBf16;
  bool to_floats = false;  ///< the output is fp32, else of the operands' type

  constexpr int a_bytes() const { return kRows * kDepth * 2; }
  constexpr int b_bytes() const { return cols * kDepth * 2; }
  constexpr int rings() const { return turns ? 1 : kConsumers; }
  /// What carriers assume: no consumer's turn moves the other's place in the ring, and old output
  /// is loaded part by part.
  constexpr bool is_good() const { return (!turns || buffers == 1) && (parts == 1 || turns); }
  constexpr int part_bytes() const { return 64 * part_cols * (to_floats ? 4 : 2); }
  constexpr int buffer_bytes() const { return parts * part_bytes(); }
};

/// A tile as the scheduler tells the others of it.
struct Record {
  int expert;                  ///< -1: there are no more
  int row, limit;              ///< its first row of A, and where other tiles begin
  int begin, end;              ///< its columns: rows of the batch, or columns of B
  int depth;                   ///< of the contraction, at least one
  int rows = 0, rows_end = 0;  ///< of a ragged contraction: how many, and where they end
};

template <Tile kTile>
struct alignas(1024) Shared {
  static_assert(kTile.is_good());
  uint8_t a[kTile.stages][kTile.a_bytes()];
  uint8_t b[kTile.stages][kTile.b_bytes()];
  uint8_t out[kTile.rings()][kTile.buffers][kTile.buffer_bytes()];
  Barrier full[kTile.stages], empty[kTile.stages];
  Barrier told[kRecords], heard[kRecords];
  Barrier free[kConsumers][kTile.buffers], done[kTile.rings()][kTile.buffers];
  Record records[kRecords];
};

/// A place in a ring, and the parity of its present round.
template <int kLength>
struct Cursor {
  int at = 0;
  uint32_t parity = 0;

  __device__ void next() {
    if (++at == kLength) at = 0, parity ^= 1;
  }
};

template <Tile kTile>
__device__ inline void prepare(Shared<kTile>& shared) {
  constexpr int kWarps = 4 * kConsumers;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kTile.stages; ++s)
      init(shared.full[s], 1), init(shared.empty[s], kCluster * kWarps);
    for (int r = 0; r < kRecords; ++r)
      init(shared.told[r], 1), init(shared.heard[r], kConsumers * kWarpgroup + 32 + kTile.rings());
    for (int b = 0; b < kTile.buffers; ++b) {
      for (int c = 0; c < kConsumers; ++c) init(shared.free[c][b], 1);
      for (int r = 0; r < kTile.rings(); ++r) init(shared.done[r][b], 4);
    }
    fence_init();
  }
  __syncthreads();
  sync_cluster();
}

/// The scheduler's side of the ring of records.
template <Tile kTile>
__device__ inline void tell(Shared<kTile>& shared, Cursor<kRecords>& at, const Record& record) {
  wait(shared.heard[at.at], at.parity ^ 1);
  shared.records[at.at] = record;
  arrive(shared.told[at.at]);
  at.next();
}

/// The same value, which the compiler then knows to be the same in all lanes of a warp.
__device__ inline int uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }

/// Whether the tile has rows for that consumer.
__device__ inline bool is_for(const Record& tile, int consumer) {
  return tile.row + 64 * consumer < tile.limit;
}

/// One thread's side.
template <Tile kTile>
__device__ inline Record hear_alone(Shared<kTile>& shared, Cursor<kRecords>& at) {
  wait(shared.told[at.at], at.parity);
  const Record record = shared.records[at.at];
  arrive(shared.heard[at.at]);
  at.next();
  return record;
}

/// A warp's side.
template <Tile kTile>
__device__ inline Record hear(Shared<kTile>& shared, Cursor<kRecords>& at) {
  const Record told = hear_alone(shared, at);
  return {uniform(told.expert), uniform(told.row),   uniform(told.limit), uniform(told.begin),
          uniform(told.end),    uniform(told.depth), uniform(told.rows),  uniform(told.rows_end)};
}

/// The body of a kernel, as a function a role: `schedule(shared)` in one thread, `produce(shared)`
/// in one warp, `carry(shared, ring)` in a thread a ring, `consume(shared, consumer)` in the
/// warpgroups that multiply.
template <Tile kTile>
__device__ inline void run_roles(auto&& schedule, auto&& produce, auto&& carry, auto&& consume) {
  auto& shared = *reinterpret_cast<Shared<kTile>*>(dynamic_shared());
  prepare(shared);
  const int role = uniform(int(threadIdx.x) / kWarpgroup);
  if (role == kConsumers) {
    give_registers<kProducerRegisters>();
    const int warp = int(threadIdx.x) % kWarpgroup / 32;
    if (warp == 0) produce(shared);
    if (threadIdx.x % 32 == 0 && warp == 3) schedule(shared);
    if (threadIdx.x % 32 == 0 && warp > 0 && warp <= kTile.rings()) carry(shared, warp - 1);
  } else {
    take_registers<kConsumerRegisters>();
    consume(shared, role);
  }
  __syncwarp();
  sync_cluster();  // the other block may still load into this one
}

/// What a kernel is launched with.
template <class Maps, class Args>
struct Launch {
  const Maps& maps;
  const Args& args;
  int blocks;
  cudaStream_t stream;
};

template <Tile kTile, class Maps, class Args>
void launch_tiles(void (*kernel)(Maps, Args), const Launch<Maps, Args>& l) {
  const Grid grid{unsigned(l.blocks), kThreads, int(sizeof(Shared<kTile>)), l.stream, kCluster};
  cuda::launch(kernel, grid, l.maps, l.args);
}

}  // namespace cadre::cuda::sm90
