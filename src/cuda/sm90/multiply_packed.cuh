#pragma once
#include "cuda/sm90/multiply.cuh"
#include "cuda/sm90/packed_codes.cuh"
#include "cuda/sm90/packed_scales.cuh"

namespace cadre::cuda::sm90 {

/// Products of packed codes and bf16 rows in one set of accumulators, in the order of Multiply16. A
/// stage is one part of 64 codes of each row or several. A consumer decodes half a part into
/// registers, wgmma's first operand, while its products of the half before run; where an SM has two
/// blocks, while the other one's do.
template <Tile kTile, class Format, bool kSplit>
class MultiplyPacked {
 public:
  static_assert(kTile.b.dtype == DType::kBf16 && kTile.b.k_major &&
                kTile.depth % kPackedDepth == 0);
  static constexpr int kRegisters = kTile.consumer_registers();  ///< of a thread

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
  static constexpr int kSets = kTile.blocks == 1 ? 2 : 1;    // of codes, in registers
  static constexpr int kHalves = 3 - kSets;                  // of a part, in a set
  static constexpr int kParts = kTile.depth / kPackedDepth;  // of a stage
  static constexpr int kSteps = kPackedDepth / 16 / 2;       // of half a part
  static constexpr int kWords = 4 * kSteps;                  // of their first operand
  static constexpr int kSize = kHalves * kWords;             // of a set
  static constexpr int kRowBytes = kTile.consumer_bytes() / kConsumerRows;  // of codes
  using Codes = PackedCodes<kTile.a.dtype, kSplit>;
  using Factors = PackedFactors<Format>;

  template <int kWidth>
  __device__ __forceinline__ void multiply_width(StageRing<kTile>& ring, const TileRecord& tile,
                                                 int consumer, auto&& meanwhile, auto&& beside) {
    Factors factors(params_.w_scales, tile, consumer);
    uint32_t codes[kSets][kSize];
    int before = 0;
    for (int depth = 0; depth < tile.depth; depth += kTile.depth, ring.at.next()) {
      ring.wait_full();
      const Stage stage = ring.stage();
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (part != 0 && depth + part * kPackedDepth >= tile.depth) break;
        const bool adds = part != 0 || depth != 0;
        factors.next_part(depth / kPackedDepth + part);
        decode<0>(stage, part, consumer, factors, codes[0]);
        multiply_set<kWidth, 0>(stage, part, codes, adds);
        if (part == 0 && adds) ring.release(before);
        if constexpr (kHalves == 1) {
          decode<1>(stage, part, consumer, factors, codes[kSets - 1]);
          multiply_set<kWidth, 1>(stage, part, codes, true);
        }
      }
      before = ring.at.at;
      beside();
    }
    meanwhile();
    wgmma_wait<0>();
    pin<kWidth / 2>(accumulators_);
    pin<kSize>(codes[kSets - 1]);
    ring.release(before);
  }

  /// Starts the products of a set, from that half of the part on, and waits until one is free.
  template <int kWidth, int kHalf>
  __device__ __forceinline__ void multiply_set(const Stage& stage, int part,
                                               uint32_t (&codes)[kSets][kSize], bool adds) {
    uint32_t(&a)[kSize] = codes[kHalf % kSets];
    const uint64_t b = matrix_descriptor<true>(stage.b + part * kTile.atom_bytes(), 0);
    pin<kWidth / 2>(accumulators_);
    pin<kSize>(a);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSize / 4; ++k)
      WgmmaOfRegisters<kWidth>::multiply_add(accumulators_, a + 4 * k,
                                             b + (kHalf * kSteps + k) * kDescriptorStep<true>,
                                             adds || k != 0);
    wgmma_commit();
    pin<kWidth / 2>(accumulators_);
    wgmma_wait<kSets - 1>();
    pin<kSize>(codes[(kHalf + 1) % kSets]);
  }

  /// A set: the codes of the consumer's 64 rows of a part from that half on.
  template <int kHalf>
  __device__ static void decode(const Stage& stage, int part, int consumer, const Factors& all,
                                uint32_t (&to)[kSize]) {
    const uint8_t* rows = stage.a + consumer * kTile.consumer_bytes();
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kHalves; ++i)
      Codes::template read<kRowBytes>(rows, 2 * part + kHalf + i, to + i * kWords, largest);
    if (Codes::has_nan(largest)) {
      pin<kSize>(to);  // so that nothing is kept for what is rare
#pragma unroll
      for (uint32_t& pair : to) Codes::put_nan(pair);
    }
    if (all.in_two_steps()) {
#pragma unroll
      for (uint32_t& pair : to) pair = mul_bf16(pair, Codes::unit());
    }
    uint32_t factors[2][Factors::kMany];
    all.of_part(factors);
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      to[i] = mul_bf16(to[i], factors[i % 2][(kHalf * kWords + i) * Factors::kMany / (2 * kWords)]);
  }

  const PackedRowsParams& params_;
  float accumulators_[kTile.cols / 2] = {};
};

}  // namespace cadre::cuda::sm90
