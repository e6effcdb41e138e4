#pragma once
#include "cuda/device/launch.h"
#include "cuda/device/matrices.h"
#include "cuda/device/tma.h"
#include "cuda/device/wgmma.h"
#include "cuda/sm90/tuning.h"

// What the grouped GEMM kernels of Hopper share: the shape of a tile, its shared memory, and the
// ring of stages between the warps that load and the warps that multiply. Two blocks, a cluster,
// work on neighbouring tiles with the same second operand: each loads half of it for both.
//
//   role        warps   work
//   producer    1       starts all loads of operands
//   carriers    1 or 2  one thread a ring: stores of output, and loads of old output
//   scheduler   1       one thread: takes tiles and tells the others of them
//   consumer 0  4       rows 0 to 63 of a tile: products, then the output
//   consumer 1  4       rows 64 to 127
//
//   barrier     count   who arrives                      who waits    guards
//   full[s]     1       producer, and the bytes          consumers    stage s holds both operands
//   empty[s]    16      consumers' warps, both blocks    producer     stage s may be overwritten
//   wanted      1       producer                         scheduler    a tile should be taken
//   asked       1       the second block's scheduler     the first's  it waits for a number
//   given       1       itself, and the bytes            the second's the number has come
//   told[r]     1       scheduler                        the others   record r describes a tile
//   heard[r]    289, 290   the others' threads           scheduler    record r may be overwritten
//   free[c][b]  1       carrier, and the bytes           consumer c   buffer b may be written
//   done[.][b]  4       warps of a consumer              carrier      buffer b holds output
namespace cadre::cuda::sm90 {

constexpr int kConsumers = 2;    // warpgroups that multiply
constexpr int kWarpgroup = 128;  // threads
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kRows = 128;                            // of a tile: 64 a consumer
constexpr uint16_t kAllBlocks = (1 << kCluster) - 1;  // of a cluster, one bit each

/// The shape of a tile, and how its operands lie.
struct Tile {
  int cols = kMostCols;  ///< at most
  int part_cols = 64;    ///< of the output, in one store
  int depth = kDepth;    ///< of a stage
  int stages = kStages;
  int ahead = kAhead;  ///< of the contraction, that is left when the next tile is taken
  /// Consumers take turns with one ring of buffers for the output; else each has its own.
  bool turns = true;
  int buffers = kBuffers;               ///< of a ring, each for a part
  bool a_along = true, b_along = true;  ///< rows of memory run along the contraction
  bool ragged_depth = false;            ///< the contraction ends anywhere in a stage
  Element element = Element::kBf16;
  bool to_floats = false;  ///< the output is fp32, else of the operands' type

  constexpr int a_bytes() const { return kRows * depth * 2; }
  constexpr int b_bytes() const { return cols * depth * 2; }
  /// Of 64 elements across, of a stage.
  constexpr int slab_bytes() const { return depth * 128; }
  constexpr int rings() const { return turns ? 1 : kConsumers; }
  constexpr int part_bytes() const { return 64 * part_cols * (to_floats ? 4 : 2); }
};

/// A tile as the scheduler tells the others of it.
struct Record {
  int expert;                  ///< -1: there are no more
  int row, limit;              ///< its first row of A, and where other tiles begin
  int begin, end;              ///< its columns: rows of the batch, or columns of B
  int depth;                   ///< of the contraction, at least one
  int rows = 0, rows_end = 0;  ///< of a ragged contraction: how many, and where they end
};

/// A thread's sums of some columns of a tile, and the part's first row of A and first column.
struct TilePart {
  const float* sums;
  int row, col;
};

template <Tile kTile>
struct alignas(1024) Shared {
  uint8_t a[kTile.stages][kTile.a_bytes()];
  uint8_t b[kTile.stages][kTile.b_bytes()];
  uint8_t out[kTile.rings()][kTile.buffers][kTile.part_bytes()];
  Barrier full[kTile.stages], empty[kTile.stages];
  Barrier told[kRecords], heard[kRecords];
  Barrier wanted, asked, given;
  Barrier free[kConsumers][kTile.buffers], done[kTile.rings()][kTile.buffers];
  Record records[kRecords];
  int64_t number;  ///< of the next tile, as the first block gives it
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
    init(shared.wanted, 1), init(shared.asked, kCluster - 1), init(shared.given, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  cluster_sync();
}

/// The rows of A that a block takes of a pair of tiles: half of them, and of the last pair a half
/// of what is left, if that is one tile.
struct BlockRows {
  int first, limit;
};
__device__ inline BlockRows block_rows(int pair, int rows) {
  const int begin = pair * kCluster * kRows;
  const int height = rows - begin <= kCluster * 64 ? 64 : kRows;
  const int first = begin + int(cluster_ctarank()) * height;
  return {first, first + height < rows ? first + height : rows};
}

/// Takes numbers of tiles, and tells the other roles of them.
template <Tile kTile>
class Scheduler {
 public:
  /// All clusters count up `taken`, which begins as zero; without it, each takes every so manieth.
  __device__ Scheduler(Shared<kTile>& shared, unsigned long long* taken)
      : shared_(shared), taken_(taken), number_(int(blockIdx.x / kCluster) - clusters()) {}

  /// The number of the cluster's next tile, once the producers want one. The first block counts,
  /// and gives the number to the others, who ask for it.
  __device__ int64_t take() {
    wait(shared_.heard[ring_.at], ring_.parity ^ 1);
    wait(shared_.wanted, wanted_);
    if (taken_ == nullptr) return number_ += clusters();
    const uint32_t parity = parity_;
    parity_ ^= 1;
    if (cluster_ctarank() != 0) {
      arrive_expect_tx(shared_.given, sizeof(shared_.number));
      arrive_cluster(shared_.asked, 0);
      wait(shared_.given, parity);
      return shared_.number;
    }
    const auto number = int64_t(atomicAdd(taken_, 1ull));
    wait(shared_.asked, parity);
    for (uint32_t block = 1; block < kCluster; ++block)
      st_async(shared_.number, number, shared_.given, block);
    return number;
  }
  /// Once for a number at most.
  __device__ void tell(const Record& record) {
    shared_.records[ring_.at] = record;
    arrive(shared_.told[ring_.at]);
    ring_.next();
    wanted_ ^= 1;
  }

 private:
  __device__ static int clusters() { return int(gridDim.x / kCluster); }

  Shared<kTile>& shared_;
  unsigned long long* taken_;
  int64_t number_;
  Cursor<kRecords> ring_;
  uint32_t parity_ = 0, wanted_ = 1;
};

/// The producer's side: asks for the next tile when so much of this one is still to be loaded.
template <Tile kTile>
__device__ inline void want_next(Shared<kTile>& shared, int depth, const Record& tile) {
  const int left = tile.depth - depth;
  if (left <= kTile.ahead && (depth == 0 || left + kTile.depth > kTile.ahead))
    arrive(shared.wanted);
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
    setmaxnreg_dec<kProducerRegisters>();
    const int warp = int(threadIdx.x) % kWarpgroup / 32;
    if (warp == 0) produce(shared);
    if (threadIdx.x % 32 == 0 && warp == 3) schedule(shared);
    if (threadIdx.x % 32 == 0 && warp > 0 && warp <= kTile.rings()) carry(shared, warp - 1);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(shared, role);
  }
  __syncwarp();
  cluster_sync();  // the other block may still load into this one
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
