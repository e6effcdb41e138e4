#pragma once
#include "cuda/device/tensor_map.h"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/gathered_load.cuh"
#include "cuda/sm90/gathered_products.h"
#include "cuda/sm90/kernel.cuh"
#include "cuda/sm90/paired_rows.cuh"
#include "cuda/sm90/ragged_rows.cuh"

// y[r, c] = sum_d x[token of r, d] * w_e[c, d] for the rows r of every expert: fprop and dgrad of
// rows that lie in the order of tokens, see gathered_load.cuh.
//
// Tiles have 128 rows of y, and up to 256 columns. They leave as they are summed, beside the
// products of the next tile.
namespace cadre::cuda::sm90 {

/// Boxes of w, K-major or MN-major.
template <Tile kTile>
class GatheredProductsLoad : public GatheredLoad<kTile, GatheredProductsParams> {
 public:
  using GatheredLoad<kTile, GatheredProductsParams>::GatheredLoad;

  __device__ void load(const Stage& stage, Barrier& full, int depth) const {
    constexpr int kCols = kTile.b.k_major ? kWeightRows : kTile.b.atom_elements();  // of a box
    constexpr int kBoxBytes = kCols * kTile.depth * element_bytes(kTile.b.dtype);
    arrive_expect_tx(full, uint32_t(kTile.b_bytes()));
#pragma unroll
    for (int box = 0; box < kTile.cols / kCols; ++box) {
      const int column = this->tile_.begin + box * kCols, expert = this->expert_;
      const Box3 at = kTile.b.k_major ? Box3{depth, column, expert} : Box3{column, depth, expert};
      this->load_box(box, stage.b + box * kBoxBytes, at, full);
    }
  }
};

/// Parts of y, 64 columns each.
template <DType kType>
class GatheredProductsStore {
 public:
  struct Memory {};
  using Held = HeldRows<kType, false>;
  using Bias = NoBias;
  static constexpr OutputShape kShape{
      .dtype = kType, .buffers = kBuffersOfHeldRows, .one_ring = false, .one_warp = true};

  __device__ GatheredProductsStore(const GatheredProductsParams& params, const TileRecord& tile)
      : params_(params), tile_(tile) {}

  __device__ Parts parts() const {
    return {(tile_.cols() + kShape.part_cols - 1) / kShape.part_cols, 0};
  }
  __device__ void store(int row, int part, const uint8_t* from) const {
    const int end = tile_.row_limit, column = tile_.begin + kShape.part_cols * part;
    tma_store(params_.y, Box4{column, kRaggedOrigin - (end - row), end, kRaggedOrigin}, from);
  }
  __device__ static void finish(const GatheredProductsParams& params) {
    zero_tail(params, params.tail);
  }

 private:
  const GatheredProductsParams& params_;
  const TileRecord& tile_;
};

/// The kernel of fprop and dgrad, from tokens.
template <GatheredProductsKind kKind>
struct GatheredProducts {
  static constexpr Tile kTile{.col_step = kGatheredColStep,
                              .records = kRecordsOfHeldRows,
                              .a = {kKind.type, true},
                              .b = {kKind.type, kKind.k_major}};
  using Params = GatheredProductsParams;
  using Schedule = PairedRowsSchedule<kTile>;
  using Load = GatheredProductsLoad<kTile>;
  using Multiply = Multiply16<kTile>;
  using Store = GatheredProductsStore<kKind.type>;
};

template <GatheredProductsKind kKind>
void launch_gathered_products(const GatheredProductsParams& params, int blocks,
                              cudaStream_t stream) {
  launch_kernel<GatheredProducts<kKind>>(params, blocks, stream);
}

}  // namespace cadre::cuda::sm90
