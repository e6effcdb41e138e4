#pragma once
#include "cuda/sm90/multiply.cuh"
#include "cuda/sm90/packed_codes.cuh"

namespace cadre::cuda::sm90 {

/// Products of packed codes and bf16 rows in one set of accumulators, in the order of Multiply16. A
/// consumer decodes the codes of half a stage into registers, wgmma's first operand, while the
/// products of the half before run: the other consumer's, and where tiles are so narrow that there
/// are registers for two halves, its own.
template <Tile kTile, class Format>
class MultiplyPacked {
 public:
  static_assert(kTile.b.dtype == DType::kBf16 && kTile.b.k_major && kTile.depth == kPackedDepth);
  static constexpr int kRegisters = kConsumerRegisters;  ///< of a thread

  __device__ explicit MultiplyPacked(const PackedRowsParams& params) : params_(params) {}

  __device__ __forceinline__ void multiply(StageRing<kTile>& ring, const TileRecord& tile,
                                           int consumer, auto&& meanwhile, auto&& beside) {
    with_width<Widths{kTile.col_step, kTile.cols, kTile.col_step}>(
        tile.cols(), [&]<int kWidth>(Width<kWidth>) {
          multiply_width<kWidth>(ring, tile, consumer, meanwhile, beside);
        });
  }
  /// A thread's accumulators from that column on.
  __device__ const float* accumulators(int col) const { return accumulators_ + col / 2; }

 private:
  static constexpr int kSteps = kTile.depth / 16 / 2;                // instructions of half a stage
  static constexpr int kWords = 4 * kSteps;                          // of their first operand
  static constexpr int kSets = kTile.cols <= kMostCols / 2 ? 2 : 1;  // what registers are there for
  using Codes = PackedCodes<kTile.a.dtype>;
  using Factors = PackedFactors<Format>;

  template <int kWidth>
  __device__ __forceinline__ void multiply_width(StageRing<kTile>& ring, const TileRecord& tile,
                                                 int consumer, auto&& meanwhile, auto&& beside) {
    const int stages = (tile.depth + kTile.depth - 1) / kTile.depth;
    Factors factors(params_.w_scales, tile, consumer);
    uint32_t sets[kSets][kWords];
    auto &first = sets[0], &second = sets[kSets - 1];  // of a stage's halves
    int before = 0;
    ring.wait_full();
    factors.next_stage(0);
    decode<0>(ring.stage(), consumer, factors, first);
    for (int stage = 0;;) {
      multiply_half<kWidth, 0>(ring.stage(), first, stage != 0);
      wgmma_wait<kSets - 1>();
      pin<kWords>(second);
      if (stage != 0) ring.release(before);
      before = ring.at.at;
      decode<1>(ring.stage(), consumer, factors, second);
      multiply_half<kWidth, 1>(ring.stage(), second, true);
      ring.at.next();
      beside();
      wgmma_wait<kSets - 1>();
      pin<kWords>(first);
      if (++stage == stages) break;
      ring.wait_full();
      factors.next_stage(stage);
      decode<0>(ring.stage(), consumer, factors, first);
    }
    meanwhile();
    wgmma_wait<0>();
    pin<kWidth / 2>(accumulators_);
    pin<kWords>(second);
    ring.release(before);
  }

  /// Of the consumer's 64 rows of a stage, half of the codes.
  template <int kHalf>
  __device__ static void decode(const Stage& stage, int consumer, const Factors& all,
                                uint32_t (&to)[kWords]) {
    uint32_t factors[2][Factors::kOfHalf];
    all.template of_half<kHalf>(factors);
    const uint8_t* rows = stage.a + consumer * kTile.consumer_bytes();
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      uint32_t pairs[kWords / 2];
      Codes::read(rows, ThreadPlace::mine().row + 8 * below, kHalf, pairs);
#pragma unroll
      for (int i = 0; i < kWords / 2; ++i) to[2 * i + below] = pairs[i];
    }
    if (all.in_two_steps()) {
      constexpr uint32_t kUnit = formats::bits_of(Codes::kUnit) >> 16;
#pragma unroll
      for (uint32_t& pair : to) pair = mul_bf16(pair, kUnit | kUnit << 16);
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      to[i] = mul_bf16(to[i], factors[i % 2][i * Factors::kOfHalf / kWords]);
  }

  template <int kWidth, int kHalf>
  __device__ __forceinline__ void multiply_half(const Stage& stage, uint32_t (&a)[kWords],
                                                bool adds) {
    const uint64_t b = matrix_descriptor<true>(stage.b, 0);
    pin<kWidth / 2>(accumulators_);
    pin<kWords>(a);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      WgmmaOfRegisters<kWidth>::multiply_add(accumulators_, a + 4 * k,
                                             b + (kHalf * kSteps + k) * kDescriptorStep<true>,
                                             adds || k != 0);
    wgmma_commit();
    pin<kWidth / 2>(accumulators_);
  }

  const PackedRowsParams& params_;
  float accumulators_[kTile.cols / 2] = {};
};

}  // namespace cadre::cuda::sm90
