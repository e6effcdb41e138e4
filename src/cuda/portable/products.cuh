#pragma once
#include <type_traits>

#include "cuda/portable/tile.cuh"

// The main loop of a tile: each thread has accumulators in registers, and knows their places in the
// tile. Every accumulator adds its products in the order of the contraction, whatever else the tile
// holds.
namespace cadre::cuda::portable {

/// How a kernel multiplies.
template <Multiplicand kMultiplicand, bool kAlongA, bool kAlongB>
struct TileKind {
  static constexpr Multiplicand kAs = kMultiplicand;
  static constexpr int kElementBytes = kAs == Multiplicand::kF32 ? 4 : 2;
  static constexpr StageLayout kA{kAlongA, kElementBytes}, kB{kAlongB, kElementBytes};
};

/// 16-bit operands on the tensor cores, by mma.sync: a warp computes 64 rows and 32 columns.
template <class Kind>
struct TensorCoreProducts {
  static constexpr int kBlocks = 2;             // an SM, by their registers
  static constexpr int kDown = 4, kAcross = 4;  // mma of 16 rows and 8 columns
  static constexpr int kRows = 16 * kDown, kCols = 8 * kAcross;
  static constexpr int kWarpsDown = kSide / kRows;

  float accumulators[kDown][kAcross][4] = {};

  __device__ static int first_row() { return int(threadIdx.x) / kLanes % kWarpsDown * kRows; }
  __device__ static int first_col() { return int(threadIdx.x) / kLanes / kWarpsDown * kCols; }

  /// The fragment of 16 rows or columns from `first` on, 16 deep.
  template <StageLayout kLayout>
  __device__ static Matrices operand(const uint8_t* stage, int first, int deep) {
    const int lane = int(threadIdx.x) % kLanes, low = lane / 8 % 2, high = lane / 16;
    if constexpr (kLayout.along) {
      const uint8_t* at = stage + kLayout.place(first + lane % 16, deep / 8 + high);
      return ldmatrix(shared_address(at));
    } else {
      const uint8_t* at = stage + kLayout.place(deep + 8 * high + lane % 8, first / 8 + low);
      return ldmatrix_trans(shared_address(at));
    }
  }

  __device__ static void multiply(float (&to)[4], const Matrices& a, const Columns8& b) {
    if constexpr (Kind::kAs == Multiplicand::kBf16)
      multiply_bf16(to, a, b);
    else
      multiply_f16(to, a, b);
  }

  /// Adds the products of a stage. Warps beyond the tile's `rows` do nothing.
  __device__ void add(const uint8_t* a, const uint8_t* b, int rows) {
    if (first_row() >= rows) return;
#pragma unroll
    for (int deep = 0; deep < Kind::kA.depth(); deep += 16) {
      Matrices left[kDown], right[kAcross / 2];
#pragma unroll
      for (int i = 0; i < kDown; ++i) left[i] = operand<Kind::kA>(a, first_row() + 16 * i, deep);
#pragma unroll
      for (int j = 0; j < kAcross / 2; ++j)
        right[j] = operand<Kind::kB>(b, first_col() + 16 * j, deep);
#pragma unroll
      for (int i = 0; i < kDown; ++i)
#pragma unroll
        for (int j = 0; j < kAcross / 2; ++j) {
          multiply(accumulators[i][2 * j], left[i], {right[j].a, right[j].c});
          multiply(accumulators[i][2 * j + 1], left[i], {right[j].b, right[j].d});
        }
    }
  }

  /// Calls use(row, column, value) for every accumulator of this thread.
  template <class Use>
  __device__ void for_each(Use&& use) const {
    const int lane = int(threadIdx.x) % kLanes;
    const int row = first_row() + lane / 4, col = first_col() + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kDown; ++i)
#pragma unroll
      for (int j = 0; j < kAcross; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          use(row + 16 * i + 8 * (k / 2), col + 8 * j + k % 2, accumulators[i][j][k]);
  }
};

/// fp32 operands on the CUDA cores, by fused multiply-adds: a thread computes rows and columns that
/// are 16 apart.
template <class Kind>
struct FmaProducts {
  static constexpr int kBlocks = 1;
  static constexpr int kApart = 16, kMany = kSide / kApart;

  float accumulators[kMany][kMany] = {};

  __device__ static int first_row() { return int(threadIdx.x) / kApart; }
  __device__ static int first_col() { return int(threadIdx.x) % kApart; }

  /// Four elements along the contraction, of one row or column.
  template <StageLayout kLayout>
  __device__ static float4 operand(const uint8_t* stage, int at, int deep) {
    if constexpr (kLayout.along) {
      return *reinterpret_cast<const float4*>(stage + kLayout.place(at, deep / 4));
    } else {
      const auto one = [&](int i) {
        return reinterpret_cast<const float*>(stage + kLayout.place(deep + i, at / 4))[at % 4];
      };
      return {one(0), one(1), one(2), one(3)};
    }
  }

  __device__ static void multiply(float& to, const float4& a, const float4& b) {
    to = fmaf(a.x, b.x, to);
    to = fmaf(a.y, b.y, to);
    to = fmaf(a.z, b.z, to);
    to = fmaf(a.w, b.w, to);
  }

  __device__ void add(const uint8_t* a, const uint8_t* b, int rows) {
    if (first_row() >= rows) return;
#pragma unroll 1
    for (int deep = 0; deep < Kind::kA.depth(); deep += 4) {
      float4 left[kMany];
#pragma unroll
      for (int i = 0; i < kMany; ++i)
        left[i] = operand<Kind::kA>(a, first_row() + kApart * i, deep);
#pragma unroll
      for (int j = 0; j < kMany; ++j) {
        const float4 right = operand<Kind::kB>(b, first_col() + kApart * j, deep);
#pragma unroll
        for (int i = 0; i < kMany; ++i) multiply(accumulators[i][j], left[i], right);
      }
    }
  }

  template <class Use>
  __device__ void for_each(Use&& use) const {
#pragma unroll
    for (int i = 0; i < kMany; ++i)
#pragma unroll
      for (int j = 0; j < kMany; ++j)
        use(first_row() + kApart * i, first_col() + kApart * j, accumulators[i][j]);
  }
};

template <class Kind>
using Products = std::conditional_t<Kind::kAs == Multiplicand::kF32, FmaProducts<Kind>,
                                    TensorCoreProducts<Kind>>;

template <class Kind>
__device__ inline void load_stage(TileShared& shared, int stage) {
  load_operand<Kind::kA>(shared.stages.a[stage % kStages], shared.tile.a, stage);
  load_operand<Kind::kB>(shared.stages.b[stage % kStages], shared.tile.b, stage);
}

/// All products of the tile: cp.async loads stages ahead of the one that is multiplied. No stage is
/// in use before and after.
template <class Kind>
__device__ inline void multiply_tile(TileShared& shared, Products<Kind>& products) {
  constexpr int kDepth = Kind::kA.depth();
  const int stages = int((shared.tile.deep + kDepth - 1) / kDepth);
  const int rows = int(shared.tile.area.rows.count());
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < stages) load_stage<Kind>(shared, stage);
    cp_async_commit();
  }
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    cp_async_wait<kStages - 2>();
    __syncthreads();
    if (stage + kStages - 1 < stages) load_stage<Kind>(shared, stage + kStages - 1);
    cp_async_commit();
    products.add(shared.stages.a[stage % kStages], shared.stages.b[stage % kStages], rows);
  }
  cp_async_wait<0>();
  __syncthreads();
}

constexpr int64_t kBand = 8;  // see schedule::banded()

/// The grid of a kernel that computes tiles.
inline Grid tile_grid(int blocks, cudaStream_t stream) {
  return {dim3(unsigned(blocks)), dim3(kTileThreads), int(sizeof(TileShared)), stream};
}

}  // namespace cadre::cuda::portable
