#pragma once
#include "cuda/sm90/kernel.cuh"
#include "cuda/sm90/ragged_rows.cuh"
#include "cuda/sm90/scattered_rows.h"

// y[slot of r, c] = sum_d x[r, d] * w_e[c, d] for the rows r of every expert: fprop and dgrad whose
// rows leave for the tokens that they belong to, in memory of this GPU or of another one.
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
  /// Where the rows of the tile belong, those of a lane a warp's width apart.
  __device__ __forceinline__ void find_rows() {
#pragma unroll
    for (int i = 0; i < kMostCols / kWarp; ++i) {
      const int row = tile_.begin + kWarp * i + lane();
      const char* to = row < tile_.end ? params_.to.row_of(params_.slot_of[row]) : nullptr;
      rows_[i] = reinterpret_cast<uintptr_t>(to);
    }
  }
  /// That part, which must be known when this is compiled, from column `column` of y on.
  __device__ __forceinline__ void scatter(int column, int part, const uint8_t* from) const {
    constexpr int kLanes = kAtomBytes / 16, kAtOnce = kWarp / kLanes;
    const int down = lane() / kLanes, sixteen = lane() % kLanes;
    column += sixteen * (16 / element_bytes(kOut));
    constexpr int kTurns = kShape.part_cols / kWarp;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn)
#pragma unroll 2
      for (int i = down; i < kWarp; i += kAtOnce) {
        const uint64_t row = __shfl_sync(~0u, rows_[kTurns * part + turn], i);
        if (row == 0 || column >= params_.cols) continue;
        auto* to = reinterpret_cast<uint4*>(row + uint64_t(column) * element_bytes(kOut));
        *to = *reinterpret_cast<const uint4*>(from + swizzled(kWarp * turn + i, sixteen));
      }
  }
  __device__ static void finish(const ScatteredRowsParams&) {}

 private:
  __device__ static int lane() { return int(threadIdx.x) % kWarp; }

  const ScatteredRowsParams& params_;
  const TileRecord& tile_;
  uint64_t rows_[kMostCols / kWarp];
};

/// The kernel of fprop and dgrad, to slots.
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
