#pragma once
#include "cuda/sm90/multiply.cuh"
#include "cuda/sm90/packed_codes.cuh"

namespace cadre::cuda::sm90 {

/// Products of packed codes and bf16 rows in one set of accumulators, in the order of Multiply16. A
/// stage is one part of 64 codes of each row or several. A consumer decodes half a part into
/// registers, wgmma's first operand, while its products of the half before run.
template <Tile kTile, class Format>
class MultiplyPacked {
 public:
  static_assert(kTile.b.dtype == DType::kBf16 && kTile.b.k_major &&
                kTile.depth % kPackedDepth == 0);
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
  static constexpr int kParts = kTile.depth / kPackedDepth;  // of a stage
  static constexpr int kSteps = kPackedDepth / 16 / 2;       // instructions of half a part
  static constexpr int kWords = 4 * kSteps;                  // of their first operand
  static constexpr int kRowBytes = kTile.consumer_bytes() / kConsumerRows;  // of codes
  using Codes = PackedCodes<kTile.a.dtype>;
  using Factors = PackedFactors<Format>;

  template <int kWidth>
  __device__ __forceinline__ void multiply_width(StageRing<kTile>& ring, const TileRecord& tile,
                                                 int consumer, auto&& meanwhile, auto&& beside) {
    const int parts = (tile.depth + kPackedDepth - 1) / kPackedDepth;
    Factors factors(params_.w_scales, tile, consumer);
    uint32_t first[kWords], second[kWords];  // of a part's halves
    int before = 0;
    ring.wait_full();
    factors.next_part(0);
    decode<0>(ring.stage(), 0, consumer, factors, first);
    for (int part = 0;;) {
      const int of_stage = part % kParts;
      multiply_half<kWidth, 0>(ring.stage(), of_stage, first, part != 0);
      wgmma_wait<1>();
      pin<kWords>(second);
      if (of_stage == 0 && part != 0) ring.release(before);
      before = ring.at.at;
      decode<1>(ring.stage(), of_stage, consumer, factors, second);
      multiply_half<kWidth, 1>(ring.stage(), of_stage, second, true);
      const bool is_last = ++part == parts, is_next_stage = part % kParts == 0;
      if (is_last || is_next_stage) ring.at.next();
      beside();
      wgmma_wait<1>();
      pin<kWords>(first);
      if (is_last) break;
      if (is_next_stage) ring.wait_full();
      factors.next_part(part);
      decode<0>(ring.stage(), part % kParts, consumer, factors, first);
    }
    meanwhile();
    wgmma_wait<0>();
    pin<kWidth / 2>(accumulators_);
    pin<kWords>(second);
    ring.release(before);
  }

  /// Of the consumer's 64 rows of a part, half of the codes.
  template <int kHalf>
  __device__ static void decode(const Stage& stage, int part, int consumer, const Factors& all,
                                uint32_t (&to)[kWords]) {
    uint32_t factors[2][Factors::kOfHalf];
    all.template of_half<kHalf>(factors);
    const uint8_t* rows = stage.a + consumer * kTile.consumer_bytes();
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      uint32_t pairs[kWords / 2];
      Codes::template read<kRowBytes>(rows, ThreadPlace::mine().row + 8 * below, 2 * part + kHalf,
                                      pairs);
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
  __device__ __forceinline__ void multiply_half(const Stage& stage, int part, uint32_t (&a)[kWords],
                                                bool adds) {
    const uint64_t b = matrix_descriptor<true>(stage.b + part * kTile.atom_bytes(), 0);
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
