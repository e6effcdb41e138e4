#pragma once
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/fp8_rows.h"
#include "cuda/sm90/multiply.cuh"

namespace cadre::cuda::sm90 {

constexpr int kScaleBlock = 128;   ///< codes along the contraction, and rows of w
constexpr int kColsOfFactor = 64;  ///< columns of a tile that share their factors
static_assert(kDepthOfCodes == kScaleBlock && kScaleBlock % kColsOfFactor == 0);

/// Scales of w of a tile, whose columns lie in two blocks of it at most: each lane of a warp holds
/// those of another stage, and those of the next 32 stages, or of the next tile, are on their way.
class ScalesOfColumns {
 public:
  __device__ explicit ScalesOfColumns(const Fp8RowsParams& params) : params_(params) {}

  /// Asks for the first of a tile.
  __device__ void look_ahead(const TileRecord& tile) {
    const int block = tile.begin / kScaleBlock;
    from_ = static_cast<const float*>(of_expert(params_.w_scales, tile.expert)) +
            block * params_.w_scale_row;
    is_alone_ = (block + 1) * kScaleBlock >= params_.cols;
    read(0);
  }
  /// Those of a stage, by a whole warp, stage by stage.
  __device__ void next(int stage, float& first, float& second) {
    if (stage % kWarp == 0) {
      first_ = coming_first_, second_ = coming_second_;
      read(stage + kWarp);
    }
    first = __shfl_sync(0xffffffff, first_, stage % kWarp);
    second = __shfl_sync(0xffffffff, second_, stage % kWarp);
  }

 private:
  __device__ void read(int stage) {
    const int mine = stage + int(threadIdx.x) % kWarp;
    if (mine * kScaleBlock >= params_.depth) return;
    const float* first = from_ + mine * params_.w_scale_depth;
    coming_first_ = first[0], coming_second_ = first[is_alone_ ? 0 : params_.w_scale_row];
  }

  const Fp8RowsParams& params_;
  const float* from_ = nullptr;
  bool is_alone_ = false;  ///< there is no second block
  float first_ = 0, second_ = 0, coming_first_ = 0, coming_second_ = 0;
};

/// Scales of both operands of a tile's expert, where blocks have none: those of the next tile are
/// on their way.
class ScalesOfExpert {
 public:
  __device__ explicit ScalesOfExpert(const Fp8RowsParams& params) : params_(params) {}

  /// Asks for those of a tile.
  __device__ void look_ahead(const TileRecord& tile) {
    coming_first_ = params_.x_scales[tile.expert];
    coming_second_ = *static_cast<const float*>(of_expert(params_.w_scales, tile.expert));
  }
  /// The tile that was asked for begins.
  __device__ void begin() { factor_ = formats::mul(coming_first_, coming_second_); }
  /// A thread's totals of it.
  template <int kCount>
  __device__ void scale(float* totals, const TileRecord&, int) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) totals[i] = formats::mul(totals[i], factor_);
  }

 private:
  const Fp8RowsParams& params_;
  float coming_first_ = 0, coming_second_ = 0, factor_ = 0;
};

/// Scales of a tile's rows and columns, where each has one. They are read when the totals are
/// there: before that no register is free. A thread reads those of its two rows, and of every 64
/// columns a lane reads two for its warp.
class ScalesOfRows {
 public:
  __device__ explicit ScalesOfRows(const Fp8RowsParams& params) : params_(params) {}

  __device__ void look_ahead(const TileRecord&) {}
  __device__ void begin() {}
  /// A thread's totals of a tile, by a whole warp.
  template <int kCount>
  __device__ void scale(float* totals, const TileRecord& tile, int consumer) const {
    constexpr int kColumns = 2 * (2 * kCount / kColsOfFactor);  // of a lane
    const int row = tile.row + consumer * kConsumerRows + ThreadPlace::mine().row;
    const auto* w = static_cast<const float*>(of_expert(params_.w_scales, tile.expert));
    float of_rows[2], of_columns[kColumns];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      of_rows[half] =
          params_.x_scales[min(row + 8 * half, tile.rows_end - 1) * params_.x_scale_step];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int col = tile.begin + i / 2 * kColsOfFactor + 2 * (int(threadIdx.x) % kWarp) + i % 2;
      of_columns[i] = col < tile.end ? w[col * params_.w_scale_row] : 0;
    }
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const int part = 2 * i / kColsOfFactor, lane = i % kWarp + int(threadIdx.x) % 4;
      const float first = __shfl_sync(0xffffffff, of_columns[2 * part], lane);
      const float second = __shfl_sync(0xffffffff, of_columns[2 * part + 1], lane);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float factor = formats::mul(of_rows[k / 2], k % 2 == 0 ? first : second);
        totals[i + k] = formats::mul(totals[i + k], factor);
      }
    }
  }

 private:
  const Fp8RowsParams& params_;
};

/// Products of 8-bit codes in blocks of kTile.depth along the contraction, rows of the batch by
/// rows of w. Hopper's adder of codes keeps fewer bits than fp32 has, so the products of a stage
/// are summed alone, and these sums, times the factor of their row and block of columns, are added
/// to the totals; or as they are, where only the totals have a factor. While one consumer does
/// that, the products of the other run.
template <Tile kTile, CodeScales kScales>
class MultiplyCodes {
 public:
  static_assert(kTile.b.dtype == DType::kE4m3 && kTile.a.k_major && kTile.b.k_major);
  static constexpr int kRegisters = kConsumerRegisters;  ///< of a thread

  __device__ explicit MultiplyCodes(const Fp8RowsParams& params) : scales_(params) {}

  __device__ void look_ahead(const TileRecord& next, int consumer) {
    if (next.is_last() || !has_rows(next, consumer)) return;  // there may be no scales either
    scales_.look_ahead(next);
  }
  __device__ void multiply(StageRing<kTile>& ring, const TileRecord& tile, int consumer,
                           auto&& meanwhile, auto&& beside) {
    with_width<Widths{kTile.col_step, kTile.cols, kTile.col_step}>(
        tile.cols(), [&]<int kWidth>(Width<kWidth>) {
          multiply_width<kWidth>(ring, tile, consumer, meanwhile, beside);
        });
  }
  /// A thread's totals from that column on.
  __device__ const float* accumulators(int col) const { return totals_ + col / 2; }

 private:
  static constexpr int kSteps = kTile.depth / 32;  // instructions of a stage
  static constexpr int kParts = kTile.cols / kColsOfFactor;
  static constexpr bool kOfBlocks = kScales == CodeScales::kOfBlocks;
  static_assert(kParts <= 3);  // or they lie in three blocks of w

  /// Of a thread's two rows and every part of the columns, in a stage.
  struct BlockFactors {
    float of[kParts][2];
  };
  struct NoFactors {};
  using Factors = std::conditional_t<kOfBlocks, BlockFactors, NoFactors>;
  /// What a tile's factors are made of.
  struct Place {
    int first_row;         ///< of a thread, in the scales of a stage
    bool middle_is_first;  ///< the second part of the columns lies in the same block as the first
  };

  template <int kWidth>
  __device__ void multiply_width(StageRing<kTile>& ring, const TileRecord& tile, int consumer,
                                 auto&& meanwhile, auto&& beside) {
    const Place place{tile.row % 4 + consumer * kConsumerRows + ThreadPlace::mine().row,
                      tile.begin % kScaleBlock == 0};
    const int last = (tile.depth - 1) / kTile.depth;
    if constexpr (!kOfBlocks) scales_.begin();
    float sums[kWidth / 2] = {};  // of a stage
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) totals_[i] = 0;
    ring.wait_full();
    for (int stage = 0; stage < last; ++stage) {
      multiply_stage<kWidth>(ring.stage(), consumer, sums);
      const Factors factors = factors_of(ring.stage(), place, stage);
      const int before = ring.at.at;
      beside();
      ring.at.next();
      ring.wait_full();  // of the next stage, so that its products begin as soon as they can
      wgmma_wait<0>();
      ring.release(before);
      add(sums, factors);
    }
    multiply_stage<kWidth>(ring.stage(), consumer, sums);
    const Factors factors = factors_of(ring.stage(), place, last);
    meanwhile();
    wgmma_wait<0>();
    ring.release(ring.at.at);
    ring.at.next();
    add(sums, factors);
    if constexpr (!kOfBlocks) scales_.template scale<kWidth / 2>(totals_, tile, consumer);
  }

  template <int kWidth>
  __device__ static void multiply_stage(const Stage& stage, int consumer,
                                        float (&sums)[kWidth / 2]) {
    const uint64_t a = matrix_descriptor<true>(stage.a + consumer * kTile.consumer_bytes(), 0);
    const uint64_t b = matrix_descriptor<true>(stage.b, 0);
    pin<kWidth / 2>(sums);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      WgmmaOfCodes<kWidth, kTile.a.dtype>::multiply_add(sums, a + k * kDescriptorStep<true>,
                                                        b + k * kDescriptorStep<true>, k != 0);
    wgmma_commit();
    pin<kWidth / 2>(sums);
  }

  __device__ Factors factors_of(const Stage& stage, const Place& place, int number) {
    Factors factors;
    if constexpr (kOfBlocks) read(factors, stage, place, number);
    return factors;
  }
  __device__ void read(BlockFactors& factors, const Stage& stage, const Place& place, int number) {
    float scales[3];
    scales_.next(number, scales[0], scales[2]);
    scales[1] = place.middle_is_first ? scales[0] : scales[2];
    const float upper = stage.scales[place.first_row], lower = stage.scales[place.first_row + 8];
    __syncwarp();  // no lane reads scales any more when one frees the stage
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      factors.of[part][0] = formats::mul(upper, scales[part]);
      factors.of[part][1] = formats::mul(lower, scales[part]);
    }
  }

  /// Adds the sums of a stage to the totals.
  template <int kCount>
  __device__ void add(float (&sums)[kCount], const Factors& factors) {
    pin<kCount>(sums);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kOfBlocks)
        totals_[i] =
            formats::fma(sums[i], factors.of[2 * i / kColsOfFactor][i / 2 % 2], totals_[i]);
      else
        totals_[i] = formats::add(totals_[i], sums[i]);
    }
  }

  using OfTotals = std::conditional_t<kScales == CodeScales::kOfRows, ScalesOfRows, ScalesOfExpert>;
  std::conditional_t<kOfBlocks, ScalesOfColumns, OfTotals> scales_;
  float totals_[kTile.cols / 2] = {};
};

}  // namespace cadre::cuda::sm90
