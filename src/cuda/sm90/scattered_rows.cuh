#pragma once
#include "cuda/sm90/kernel.cuh"
#include "cuda/sm90/ragged_rows.cuh"
#include "cuda/sm90/scattered_rows.h"

// y[place of r, c] = sum_d x[r, d] * w_e[c, d] for the rows r of every expert: fprop and dgrad
// whose rows leave for where they belong, in memory of this GPU or of another one.
//
// All but the stores is ragged_rows.cuh. TMA stores no rows here and there, so the store warps
// write them, sixteen bytes a thread, beside the products of the next tile.
namespace cadre::cuda::sm90 {

/// Parts of y, of which a warp has the rows.
template <DType kOut>
class ScatteredRowsStore {
 public:
  struct Memory {};
  using Held = HeldRows<kOut, true>;
  using Bias = NoBias;
  static constexpr OutputShape kShape = held_output_of_rows(kOut);

  __device__ ScatteredRowsStore(const ScatteredRowsParams& params, const TileRecord& tile)
      : params_(params), tile_(tile) {}

  __device__ Parts parts() const {
    return {(tile_.cols() + kShape.part_cols - 1) / kShape.part_cols, 0};
  }
  /// Where the rows of a part belong, those of a lane a warp's width apart.
  __device__ void find_rows(int part) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int row = tile_.begin + part * kShape.part_cols + kWarp * turn + lane();
      begins_[turn] = row < tile_.end ? params_.to.begin_of(params_.place_of[row]) : kNoPlace;
    }
  }
  /// These rows, from column `column` of y on. Several are on their way at once: a store that waits
  /// for memory keeps its registers.
  __device__ void scatter(int column, const uint8_t* from) const {
    constexpr int kLanes = kAtomBytes / 16, kAtOnce = kWarp / kLanes, kMany = 4;
    const int down = lane() / kLanes, sixteen = lane() % kLanes;
    column += sixteen * (16 / element_bytes(kOut));
    const bool is_inside = column < params_.cols;
    auto* first =
        reinterpret_cast<uint4*>(params_.to.first + int64_t(column) * element_bytes(kOut));
    static_assert(kTurns == 2);
#pragma unroll 1
    for (int i = down; i < kShape.part_cols; i += kMany * kAtOnce) {
      const uint32_t begins = i < kWarp ? begins_[0] : begins_[1];
      uint4 words[kMany];
#pragma unroll
      for (int k = 0; k < kMany; ++k)
        words[k] = *reinterpret_cast<const uint4*>(from + swizzled(i + k * kAtOnce, sixteen));
#pragma unroll
      for (int k = 0; k < kMany; ++k) {
        const uint32_t begin = __shfl_sync(~0u, begins, (i + k * kAtOnce) % kWarp);
        if (begin != kNoPlace && is_inside) first[begin] = words[k];
      }
    }
  }
  __device__ static void finish(const ScatteredRowsParams&) {}

 private:
  static constexpr int kTurns = kShape.part_cols / kWarp;

  __device__ static int lane() { return int(threadIdx.x) % kWarp; }

  const ScatteredRowsParams& params_;
  const TileRecord& tile_;
  uint32_t begins_[kTurns];
};

/// The kernel of fprop and dgrad, to places.
template <ScatteredRowsKind kKind>
struct ScatteredRows {
  static constexpr Tile kTile{
      .records = kRecordsOfHeldRows, .a = {kKind.type, kKind.k_major}, .b = {kKind.type, true}};
  using Params = ScatteredRowsParams;
  using Schedule = RaggedRowsSchedule<kTile>;
  using Load = RaggedRowsLoad<kTile>;
  using Multiply = Multiply16<kTile>;
  using Store = ScatteredRowsStore<kKind.type>;
};

template <ScatteredRowsKind kKind>
void launch_scattered_rows(const ScatteredRowsParams& params, int blocks, cudaStream_t stream) {
  launch_kernel<ScatteredRows<kKind>>(params, blocks, stream);
}

}  // namespace cadre::cuda::sm90
