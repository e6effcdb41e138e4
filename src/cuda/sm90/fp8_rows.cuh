#pragma once
#include "cuda/device/tensor_map.h"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/fp8_rows.h"
#include "cuda/sm90/kernel.cuh"
#include "cuda/sm90/multiply_codes.cuh"
#include "cuda/sm90/paired_rows.cuh"

// y[r, c] = alpha_e * sum_b s[r, b] * t_e[c / 128, b] * (sum_d x[r, d] * w_e[c, d]) (+ as of
// ragged_rows.cuh), d in block b of 128: fprop and dgrad of fp8_block. Those of fp8_tensor have one
// s and one t an expert: y = alpha_e * (s_e * t_e * sum_b (...)). Those of fp8_row have one s a row
// and one t a column: y = alpha_e * ((s[r] * t_e[c]) * sum_b (...)).
//
// x [R, D] are codes with a scale s a row and block; w [E, C, D] are codes with a scale t for each
// 128 x 128. Both lie with the contraction inside, so that w of dgrad is a turned copy. A stage is
// a block of the contraction. Rows of the batch are the first operand: a thread has two of them,
// and so two factors for as many columns as lie in a block of w.
namespace cadre::cuda::sm90 {

/// Two boxes of rows of the batch and two of rows of w, of which a block loads one for both where
/// they share them; and the scales of its rows in the stage's block, if there are any: one copy,
/// from the last multiple of 16 bytes before them to the first behind them.
template <Tile kTile>
class Fp8RowsLoad {
 public:
  static constexpr int kWarps = 1, kArrivals = 1;
  static constexpr bool kScales = kTile.scales != 0;

  __device__ Fp8RowsLoad(const Fp8RowsParams& params, const TileRecord& tile)
      : tile_(tile),
        x_(params.x + kConsumerRows / kBoxRows - 1),
        scales_(params.x_scales + tile.row / 4 * 4),
        scale_step_(params.x_scale_step),
        scale_bytes_(kScales ? ((tile.rows_end + 3) / 4 - tile.row / 4) * 16 : 0) {
    const bool packed = params.experts == nullptr;
    w_ = packed ? &params.w : params.experts + tile.expert;
    expert_ = packed ? tile.expert : 0;
    if (!packed) tensormap_acquire(*w_);
  }

  __device__ void load(const Stage& stage, Barrier& full, int depth) const {
    const int mine = int(cluster_ctarank());
    arrive_expect_tx(full, uint32_t(kTile.a_bytes() + kTile.b_bytes() + scale_bytes_));
    if constexpr (kScales)
      bulk_load(stage.scales, scales_ + depth / kScaleBlock * scale_step_, uint32_t(scale_bytes_),
                full);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint8_t* a = stage.a + half * kTile.consumer_bytes();
      uint8_t* b = stage.b + half * (kTile.b_bytes() / 2);
      const int row = tile_.row + half * kConsumerRows, end = tile_.rows_end;
      const Box4 rows{depth, kRaggedOrigin - (end - row), end, kRaggedOrigin};
      const Box3 columns{depth, tile_.begin + half * (kTile.cols / 2), expert_};
      if (tile_.same_rows == 0)
        tma_load(a, *x_, rows, full);
      else if (half == mine)
        tma_load(a, *x_, rows, full, kAllBlocks);
      if (tile_.same_rows != 0)
        tma_load(b, *w_, columns, full);
      else if (half == mine)
        tma_load(b, *w_, columns, full, kAllBlocks);
    }
  }

 private:
  const TileRecord& tile_;
  const CUtensorMap *x_, *w_;
  const float* scales_;
  int64_t scale_step_;
  int scale_bytes_;
  int expert_;  ///< its coordinate in w_
};

/// Parts of y, as they lie.
template <OutputShape kOutput>
class Fp8RowsStore {
 public:
  struct Memory {};
  static constexpr OutputShape kShape = kOutput;

  __device__ Fp8RowsStore(const Fp8RowsParams& params, const TileRecord& tile)
      : params_(params),
        tile_(tile),
        has_epilogue_(params.has_epilogue()),
        beta_(beta_of(params, tile.expert)) {}

  __device__ Parts parts() const {
    const int count = (tile_.cols() + kShape.part_cols - 1) / kShape.part_cols;
    return {count, beta_ == 0 ? 0 : count};
  }
  __device__ void write(const TilePart& part, uint32_t to) const {
    if (!has_epilogue_) return write_upright<kShape.dtype>(part.accumulators, to);
    float finished[kShape.part_cols / 2];
    finish_rows<false>(params_, tile_, part, finished, [&](auto& sums) {
      if (beta_ != 0) add_upright<kShape.dtype>(beta_, to, sums);
    });
    write_upright<kShape.dtype>(finished, to);
  }
  __device__ void open() const {}
  /// A part of c.
  __device__ void load(int row, int part, uint8_t* to, Barrier& loaded) const {
    tma_load(to, params_.c, box(row, part), loaded);
  }
  __device__ void store(int row, int part, const uint8_t* from) const {
    tma_store(params_.y, box(row, part), from);
  }
  __device__ static void finish(const Fp8RowsParams& params) { zero_tail(params, params.tail); }

 private:
  __device__ Box4 box(int row, int part) const {
    const int end = tile_.row_limit, col = tile_.begin + kShape.part_cols * part;
    return {col, kRaggedOrigin - (end - row), end, kRaggedOrigin};
  }

  const Fp8RowsParams& params_;
  const TileRecord& tile_;
  const bool has_epilogue_;  ///< looked up once a tile, as beta: no part waits for it
  const float beta_;
};

/// The kernel of fprop and dgrad of fp8_block, of fp8_tensor, and of fp8_row.
template <Fp8RowsKind kKind>
struct Fp8Rows {
  static constexpr bool kFloats = kKind.out == DType::kF32;
  static constexpr Tile kTile{.cols = cols_of_codes(kKind.out),
                              .col_step = kColsOfFactor,
                              .depth = kDepthOfCodes,
                              .stages = kStagesOfCodes,
                              .a = {kKind.in, true},
                              .b = {DType::kE4m3, true},
                              .scales = kKind.scales == CodeScales::kOfBlocks ? kTileRows + 4 : 0};
  static constexpr OutputShape kOutput{.dtype = kKind.out,
                                       .part_cols = cols_of_upright_part(kKind.out),
                                       .buffers = kFloats ? kBuffersOfFloatRows : kBuffersOfCodes,
                                       .one_ring = !kFloats};
  using Params = Fp8RowsParams;
  using Schedule = PairedRowsSchedule<kTile>;
  using Load = Fp8RowsLoad<kTile>;
  using Multiply = MultiplyCodes<kTile, kKind.scales>;
  using Store = Fp8RowsStore<kOutput>;
};

template <Fp8RowsKind kKind>
void launch_fp8_rows(const Fp8RowsParams& params, int blocks, cudaStream_t stream) {
  launch_kernel<Fp8Rows<kKind>>(params, blocks, stream);
}

}  // namespace cadre::cuda::sm90
