#include "cuda/sm90/dense_rows.h"

#include "cuda/device/cluster.h"
#include "cuda/device/launch.h"
#include "cuda/device/tma.h"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/multiply.cuh"

// y[r, c] = sum_d x[r, d] w[c, d] of all rows: the product of a router. As in ragged_rows.cuh the
// weight is the first operand, so that a tile is as wide as it has rows of x.
//
// A router is narrow, so its tiles are few, and what takes time is one contraction. It is cut into
// kStretches, whose number depends on nothing, and their sums are added in order: with few rows by
// a cluster that has a block for each, else by the block that sums them one after another. A row's
// sums are the same either way.
//
//   role        warps      work
//   consumers   4 each     products of 64 rows of w, then their sums
//   load        1          starts the loads of a stage
//
// A block has one tile. Where w has fewer rows than a tile, products with what lies behind them in
// a stage go nowhere. Clusters keep their sums behind the stages, where the others read them.
namespace cadre::cuda::sm90 {
namespace {

constexpr int kDenseThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kMostStages = 8, kStageBytes = 192 << 10, kSumBytes = 32 << 10;
constexpr int kWeightBytes = kDenseRows * kAtomBytes;
static_assert(gemm::Roles{.consumers = kConsumers,
                          .load_warps = 1,
                          .store_warps = 0,
                          .consumer_registers = kConsumerRegisters,
                          .producer_registers = kProducerRegisters}
                  .fits());
static_assert(kDenseDepth * 2 == kAtomBytes);
static_assert(kSumBytes == kMostSplitCols * kDenseRows * 4);

struct alignas(1024) DenseShared {
  uint8_t stages[kStageBytes];
  float sums[kMostSplitCols / 2][kConsumers * kWarpgroup];  // more stages if nothing is split
  Barrier stage_full[kMostStages], stage_empty[kMostStages];
};
static_assert(sizeof(DenseShared) <= kMostSharedBytes - kSharedBytesOfBlock);

/// Stages of a tile, from the first of a stretch to before its last.
struct Stretch {
  int first, end;

  __device__ bool is_empty() const { return first >= end; }
};

/// What a block has to do.
struct DenseTile {
  int w_row, x_row;   ///< its first rows of both
  int consumers;      ///< that have rows of w
  int each, all;      ///< stages of a stretch, and of all
  int first, end;     ///< its stretches
  int stages, bytes;  ///< of its ring, and of one of them

  __device__ explicit DenseTile(const DenseRowsParams& p) {
    const int left = p.cols - int(blockIdx.y) * kDenseRows;
    const int block = int(blockIdx.x) % p.split;
    w_row = int(blockIdx.y) * kDenseRows;
    x_row = int(blockIdx.x) / p.split * p.width;
    consumers = left > kConsumerRows ? kConsumers : 1;
    all = (p.depth + kDenseDepth - 1) / kDenseDepth;
    each = (all + kStretches - 1) / kStretches;
    first = block * (kStretches / p.split), end = first + kStretches / p.split;
    bytes = kWeightBytes + p.width * kAtomBytes;
    const int room = (kStageBytes + (p.split == 1 ? kSumBytes : 0)) / bytes;
    stages = room < kMostStages ? room : kMostStages;
  }
  __device__ Stretch stretch(int number) const {
    const int from = number * each, to = from + each;
    return {from, to < all ? to : all};
  }
};

/// A role's place in the ring of stages, whose number and bytes the width says.
class DenseRing {
 public:
  __device__ DenseRing(DenseShared& shared, const DenseTile& tile) : shared_(shared), tile_(tile) {}

  __device__ int number() const { return at_; }
  __device__ uint8_t* a() const { return shared_.stages + at_ * tile_.bytes; }
  __device__ uint8_t* b() const { return a() + kWeightBytes; }
  __device__ Barrier& full() const { return shared_.stage_full[at_]; }
  __device__ void wait_full() const { wait(full(), parity_); }
  __device__ void wait_empty() const { wait_asleep(shared_.stage_empty[at_], parity_ ^ 1); }
  /// By a whole warp.
  __device__ void release(int stage) const {
    if (threadIdx.x % kWarp == 0) arrive(shared_.stage_empty[stage]);
  }
  __device__ void next() {
    if (++at_ == tile_.stages) at_ = 0, parity_ ^= 1;
  }

 private:
  DenseShared& shared_;
  const DenseTile& tile_;
  int at_ = 0;
  uint32_t parity_ = 0;
};

__device__ inline void load_stages(DenseShared& shared, const DenseTile& tile,
                                   const DenseRowsParams& params) {
  DenseRing ring(shared, tile);
  const Stretch mine{tile.stretch(tile.first).first, tile.stretch(tile.end - 1).end};
  for (int stage = mine.first; stage < mine.end; ++stage, ring.next()) {
    ring.wait_empty();
    if (!elect()) continue;
    arrive_expect_tx(ring.full(), uint32_t((params.w_rows + params.width) * kAtomBytes));
    tma_load(ring.a(), params.w, Box3{stage * kDenseDepth, tile.w_row, 0}, ring.full());
    tma_load(ring.b(), params.x, Box3{stage * kDenseDepth, tile.x_row, 0}, ring.full());
  }
}

/// The sums of one stretch: 64 rows of w by kWidth rows of x.
template <int kWidth, DType kIn>
__device__ __forceinline__ void sum_stretch(DenseRing& ring, const Stretch& stretch, int consumer,
                                            float (&sums)[kWidth / 2]) {
  constexpr int kSteps = kAtomBytes / 32;
  int before = 0;
  for (int stage = stretch.first; stage < stretch.end; ++stage, ring.next()) {
    ring.wait_full();
    const uint64_t a = matrix_descriptor<true>(ring.a() + consumer * kConsumerRows * kAtomBytes, 0);
    const uint64_t b = matrix_descriptor<true>(ring.b(), 0);
    pin<kWidth / 2>(sums);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      Wgmma<kWidth, kIn>::template multiply_add<true, true>(sums, a + k * kDescriptorStep<true>,
                                                            b + k * kDescriptorStep<true>,
                                                            stage != stretch.first || k != 0);
    wgmma_commit();
    pin<kWidth / 2>(sums);
    wgmma_wait<1>();
    if (stage != stretch.first) ring.release(before);
    before = ring.number();
  }
  wgmma_wait<0>();
  pin<kWidth / 2>(sums);
  ring.release(before);
}

/// Where a thread's sums of a tile go. Rows of y are columns of the accumulators.
class DenseOutput {
 public:
  __device__ DenseOutput(const DenseRowsParams& p, const DenseTile& tile, int consumer)
      : step_(p.y_step) {
    const ThreadPlace mine = ThreadPlace::mine();
    const int row = tile.x_row + mine.col, col = tile.w_row + consumer * kConsumerRows + mine.row;
    rows_ = p.rows - row, cols_ = p.cols - col;
    to_ = p.y + row * step_ + col;
  }

  /// Accumulator i.
  __device__ void write(int i, float sum) const {
    const int row = ThreadPlace::col_of(i), col = ThreadPlace::row_of(i);
    if (row < rows_ && col < cols_) to_[row * step_ + col] = sum;
  }
  /// All of them. The address goes from row to row: one for each would take registers of sums.
  template <int kCount>
  __device__ void write_all(const float (&sums)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
#pragma unroll
      for (int k = 0; k < 4; ++k) write(k, sums[i + k]);
      to_ += 8 * step_, rows_ -= 8;
    }
  }

 private:
  float* to_;
  int64_t step_;
  int rows_, cols_;  ///< left from there on
};

/// All stretches of a tile, one after another.
template <int kWidth, DType kIn>
__device__ __forceinline__ void sum_all(DenseShared& shared, const DenseTile& tile,
                                        const DenseRowsParams& params, int consumer) {
  DenseRing ring(shared, tile);
  float sums[kWidth / 2] = {}, total[kWidth / 2] = {};
  for (int number = 0; number < kStretches; ++number) {
    const Stretch stretch = tile.stretch(number);
    if (stretch.is_empty()) break;
    sum_stretch<kWidth, kIn>(ring, stretch, consumer, sums);
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) total[i] = number == 0 ? sums[i] : total[i] + sums[i];
  }
  DenseOutput(params, tile, consumer).write_all(total);
}

/// This block's stretch, to where the blocks of its cluster read it.
template <int kWidth, DType kIn>
__device__ __forceinline__ void sum_mine(DenseShared& shared, const DenseTile& tile, int consumer) {
  DenseRing ring(shared, tile);
  const Stretch stretch = tile.stretch(tile.first);
  if (stretch.is_empty()) return;
  float sums[kWidth / 2] = {};
  sum_stretch<kWidth, kIn>(ring, stretch, consumer, sums);
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) shared.sums[i][threadIdx.x] = sums[i];
}

/// Adds up this block's share of a tile: an eighth of every thread's accumulators.
__device__ inline void add_stretches(DenseShared& shared, const DenseTile& tile,
                                     const DenseRowsParams& params, int consumer) {
  const DenseOutput output(params, tile, consumer);
  const int share = params.width / 2 / kStretches, first = int(cluster_ctarank()) * share;
  for (int i = first; i < first + share; ++i) {
    float sums[kStretches];
#pragma unroll
    for (int block = 0; block < kStretches; ++block)
      sums[block] = ld_cluster(shared.sums[i][threadIdx.x], uint32_t(block));
    float total = sums[0];
#pragma unroll
    for (int block = 1; block < kStretches; ++block)
      if (!tile.stretch(block).is_empty()) total += sums[block];
    output.write(i, total);
  }
}

__device__ inline void begin_dense(DenseShared& shared, const DenseTile& tile) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < tile.stages; ++stage) {
      init(shared.stage_full[stage], 1);
      init(shared.stage_empty[stage], tile.consumers * kWarpgroup / kWarp);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  begin_dependent();
}

/// Calls work(Width, consumer) by whoever has rows of w; the load warp loads.
template <int kMost>
__device__ __forceinline__ void share_work(DenseShared& shared, const DenseTile& tile,
                                           const DenseRowsParams& params, auto&& work) {
  const int warpgroup = gemm::uniform(int(threadIdx.x) / kWarpgroup);
  if (warpgroup == kConsumers) {
    setmaxnreg_dec<kProducerRegisters>();
    if (int(threadIdx.x) % kWarpgroup < kWarp) load_stages(shared, tile, params);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    if (warpgroup < tile.consumers)
      with_width<Widths{kDenseColStep, kMost, kDenseColStep}>(
          params.width, [&](auto width) { work(width, warpgroup); });
  }
}

template <DType kIn>
__global__ void __launch_bounds__(kDenseThreads, 1)
    dense_rows_kernel(const __grid_constant__ DenseRowsParams params) {
  auto& shared = *reinterpret_cast<DenseShared*>(dynamic_shared());
  const DenseTile tile(params);
  begin_dense(shared, tile);
  share_work<kDenseCols>(shared, tile, params, [&]<int kWidth>(Width<kWidth>, int consumer) {
    sum_all<kWidth, kIn>(shared, tile, params, consumer);
  });
}

template <DType kIn>
__global__ void __cluster_dims__(kStretches) __launch_bounds__(kDenseThreads, 1)
    split_dense_rows_kernel(const __grid_constant__ DenseRowsParams params) {
  auto& shared = *reinterpret_cast<DenseShared*>(dynamic_shared());
  const DenseTile tile(params);
  begin_dense(shared, tile);
  share_work<kMostSplitCols>(shared, tile, params, [&]<int kWidth>(Width<kWidth>, int consumer) {
    sum_mine<kWidth, kIn>(shared, tile, consumer);
  });
  __syncwarp();
  cluster_sync();
  const int warpgroup = int(threadIdx.x) / kWarpgroup;
  if (warpgroup < tile.consumers) add_stretches(shared, tile, params, warpgroup);
  __syncwarp();
  cluster_sync();  // others may still read here
}

template <DType kIn>
void launch_as(const DenseRowsParams& p, cudaStream_t stream) {
  const bool split = p.split > 1;
  const auto x_tiles = unsigned((p.rows + p.width - 1) / p.width);
  const auto w_tiles = unsigned((p.cols + kDenseRows - 1) / kDenseRows);
  cuda::launch(split ? &split_dense_rows_kernel<kIn> : &dense_rows_kernel<kIn>,
               {.blocks = {x_tiles * unsigned(p.split), w_tiles},
                .threads = kDenseThreads,
                .shared_bytes = int(sizeof(DenseShared)),
                .stream = stream,
                .cluster = p.split,
                .dependent = true},
               p);
}

}  // namespace

void launch_dense_rows(const DenseRowsParams& params, DType dtype, cudaStream_t stream) {
  return dtype == DType::kBf16 ? launch_as<DType::kBf16>(params, stream)
                               : launch_as<DType::kF16>(params, stream);
}

}  // namespace cadre::cuda::sm90
