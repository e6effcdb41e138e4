#pragma once
#include "cuda/sm90/fp8_rows.h"
#include "cuda/sm90/multiply_codes.cuh"
#include "cuda/sm90/ragged_rows.cuh"

// y[r, c] = alpha_e * sum_b s[r, b] * t_e[c / 128, b] * (sum_d x[r, d] * w_e[c, d]) (+ as of
// ragged_rows.cuh), d in block b of 128: fprop and dgrad of fp8_block.
//
// x [R, D] are codes with a scale s a row and block; w [E, C, D] are codes with a scale t for each
// 128 x 128. Both lie with the contraction inside, so that w of dgrad is a turned copy. A stage is
// a block of the contraction.
namespace cadre::cuda::sm90 {

constexpr int kScaleBlock = 128;  ///< codes along the contraction, and rows of w
static_assert(kDepthOfCodes == kScaleBlock && kTileRows <= kScaleBlock);

/// As RaggedRowsLoad, with the scales of the tile's rows in the stage's block: one copy, from the
/// last multiple of 16 bytes before them to the first behind them.
template <Tile kTile>
class Fp8RowsLoad : RaggedRowsLoad<kTile> {
 public:
  using Base = RaggedRowsLoad<kTile>;
  using Base::kArrivals, Base::kWarps;

  __device__ Fp8RowsLoad(const Fp8RowsParams& params, const TileRecord& tile)
      : Base(params, tile),
        scales_(params.x_scales + tile.begin / 4 * 4),
        step_(params.x_scale_step),
        bytes_(((tile.end + 3) / 4 - tile.begin / 4) * 16) {}

  __device__ void load(const Stage& stage, Barrier& full, int depth) const {
    this->expect(full, bytes_);
    if (cluster_ctarank() == 0)
      bulk_load(stage.scales, scales_ + depth / kScaleBlock * step_, uint32_t(bytes_), full,
                kAllBlocks);
    this->load_operands(stage, full, depth);
  }

 private:
  const float* scales_;
  int64_t step_;
  int bytes_;
};

/// Factors of a tile, stage by stage: lanes hold those scales of the weight that come next.
template <Tile kTile>
class Fp8RowsScale {
 public:
  __device__ Fp8RowsScale(const Fp8RowsParams& params, const TileRecord& tile)
      : blocks_((tile.depth + kScaleBlock - 1) / kScaleBlock),
        step_(params.w_scale_depth),
        of_w_(static_cast<const float*>(of_expert(params.w_scales, tile.expert)) +
              tile.row / kScaleBlock * params.w_scale_row),
        early_(tile.begin % 4) {}

  __device__ void write(StageFactors<kTile>& factors, int stage, int block) {
    const int lane = int(threadIdx.x) % kWarp;
    if (block % kWarp == 0) held_ = block + lane < blocks_ ? of_w_[(block + lane) * step_] : 0.0f;
    const float of_block = __shfl_sync(0xffffffff, held_, block % kWarp);
    const float* scales = factors.scales_of(stage) + early_;
#pragma unroll
    for (int col = lane; col < kTile.cols; col += kWarp)
      factors.put(stage, col, formats::mul(scales[col], of_block));
  }

 private:
  int blocks_;
  int64_t step_;
  const float* of_w_;
  int early_;  ///< scales before the first row's
  float held_ = 0;
};

/// The kernel of fprop and dgrad of fp8_block.
template <Fp8RowsKind kKind>
struct Fp8Rows {
  static constexpr Tile kTile{.cols = kColsOfCodes,
                              .depth = kDepthOfCodes,
                              .stages = kStagesOfCodes,
                              .a = {DType::kE4m3, true},
                              .b = {kKind.in, true},
                              .scaling = kKind.powers ? Scaling::kPowers : Scaling::kFloats};
  static constexpr OutputShape kOutput{.dtype = kKind.out,
                                       .part_cols = rows_of_fp8_part(kKind.out)};
  using Params = Fp8RowsParams;
  using Schedule = RaggedRowsSchedule<kTile>;
  using Load = Fp8RowsLoad<kTile>;
  using Scale = Fp8RowsScale<kTile>;
  using Multiply = MultiplyCodes<kTile>;
  using Store = RaggedRowsStore<kOutput>;
};

template <Fp8RowsKind kKind>
void launch_fp8_rows(const Fp8RowsParams& params, int blocks, cudaStream_t stream) {
  launch_kernel<Fp8Rows<kKind>>(params, blocks, stream);
}

}  // namespace cadre::cuda::sm90
