#pragma once
#include "cuda/sm90/multiply.cuh"
#include "cuda/sm90/packed_codes.cuh"
#include "cuda/sm90/packed_scales.cuh"

namespace cadre::cuda::sm90 {

/// Products of packed codes and bf16 rows in one set of accumulators, in the order of Multiply16. A
/// stage is one part of 64 codes of each row or several. A consumer decodes a set of codes into
/// registers, wgmma's first operand: half a part, while its products of the half before run; or,
/// where consumers are many, a whole part, while theirs do. The next set is loaded meanwhile.
template <Tile kTile, class Format, Decoding kDecoding>
class MultiplyPacked {
  using Codes = PackedCodes<kTile.a.dtype, kDecoding>;

 public:
  static_assert(kTile.b.dtype == DType::kBf16 && kTile.b.k_major &&
                kTile.depth % kPackedDepth == 0);
  static constexpr int kRegisters = kTile.consumer_registers();  ///< of a thread

  using Memory = typename Codes::Table;
  __device__ static void begin(Memory& table) { table.fill(); }
  __device__ MultiplyPacked(const PackedRowsParams& params, const Memory& table)
      : table_(table), factors_(params.w_scales) {}

  /// The tile that comes next: its scales.
  __device__ void look_ahead(const TileRecord& next, int consumer) {
    if (!next.is_last()) factors_.begin(next, consumer);
  }
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
  static constexpr bool kWhole = kTile.consumers != kConsumers;  // parts in a set
  static constexpr int kSets = kWhole ? 1 : 2;                   // in registers
  static constexpr int kHalves = kWhole ? 2 : 1;                 // of a part, in a set
  static constexpr int kParts = kTile.depth / kPackedDepth;      // of a stage
  static constexpr int kOfPart = 2 / kHalves;                    // sets
  static constexpr int kSteps = kPackedDepth / 16 / 2;           // of half a part
  static constexpr int kWords = 4 * kSteps;                      // of their first operand
  static constexpr int kSize = kHalves * kWords;                 // of a set
  static constexpr int kLoaded = Codes::kWords;                  // of its first half's codes
  static constexpr int kRowBytes = kTile.consumer_bytes() / kConsumerRows;  // of codes
  // Products under way where a loop may end would make the compiler serialise all of them.
  static_assert(kParts == 1 || kSets == 1);
  using Factors = PackedFactors<Format, kParts, !std::is_empty_v<Memory>>;

  template <int kWidth>
  __device__ __forceinline__ void multiply_width(StageRing<kTile>& ring, const TileRecord& tile,
                                                 int consumer, auto&& meanwhile, auto&& beside) {
    constexpr int kSetsOfStage = kParts * kOfPart;
    uint32_t codes[kSets][kSize], loaded[kLoaded];
    const auto begin_stage = [&](int depth) __attribute__((always_inline)) {
      ring.wait_full();
      load(ring.stage(), 0, consumer, loaded);
      factors_.next_part(depth / kPackedDepth, 0);
    };
    begin_stage(0);
    int before = 0;
    for (int depth = 0; depth < tile.depth; depth += kTile.depth) {
      const Stage stage = ring.stage();
#pragma unroll
      for (int set = 0; set < kSetsOfStage; ++set) {
        const int part = set / kOfPart;
        if (set % kOfPart == 0 && part != 0 && depth + part * kPackedDepth >= tile.depth) break;
        const auto load_half = [&](int half, uint32_t* words) __attribute__((always_inline)) {
          load(stage, kHalves * set + half, consumer, words);
        };
        decode(
            set % kOfPart, loaded, load_half, codes[set % kSets], [&]() __attribute__((always_inline)) {
              if (set + 1 == kSetsOfStage) return;
              load(stage, kHalves * (set + 1), consumer, loaded);
              if ((set + 1) % kOfPart == 0)
                factors_.next_part(depth / kPackedDepth, (set + 1) / kOfPart);
            });
        multiply_set<kWidth>(stage, set, codes, set != 0 || depth != 0);
        if (set == 0 && depth != 0) ring.release(before);
      }
      before = ring.at.at;
      ring.at.next();
      beside();
      if (depth + kTile.depth < tile.depth) begin_stage(depth + kTile.depth);
    }
    meanwhile();
    wgmma_wait<0>();
    pin<kWidth / 2>(accumulators_);
#pragma unroll
    for (auto& set : codes) pin<kSize>(set);
    ring.release(before);
  }

  /// Starts the products of a set of the stage, and waits until one is free.
  template <int kWidth>
  __device__ __forceinline__ void multiply_set(const Stage& stage, int set,
                                               uint32_t (&codes)[kSets][kSize], bool adds) {
    uint32_t(&a)[kSize] = codes[set % kSets];
    const uint64_t b = matrix_descriptor<true>(stage.b + set / kOfPart * kTile.atom_bytes(), 0);
    pin<kWidth / 2>(accumulators_);
    pin<kSize>(a);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSize / 4; ++k)
      WgmmaOfRegisters<kWidth>::multiply_add(
          accumulators_, a + 4 * k, b + (set % kOfPart * kSteps + k) * kDescriptorStep<true>,
          adds || k != 0);
    wgmma_commit();
    pin<kWidth / 2>(accumulators_);
    wgmma_wait<kSets - 1>();
    pin<kSize>(codes[(set + 1) % kSets]);
  }

  /// The codes of half a part: of the consumer's 64 rows.
  __device__ static void load(const Stage& stage, int half, int consumer, uint32_t* words) {
    Codes::template load<kRowBytes>(stage.a + consumer * kTile.consumer_bytes(), half, words);
  }

  /// Set number `half` of a part. `meanwhile()` is done before what was looked up is needed.
  __device__ __forceinline__ void decode(int half, const uint32_t (&loaded)[kLoaded],
                                         auto&& load_half, uint32_t (&to)[kSize],
                                         auto&& meanwhile) {
    uint32_t largest = 0, second[kLoaded];
    if (kHalves == 2) load_half(1, second);
    Codes::place(table_, loaded, to, largest);
    if (kHalves == 2) Codes::place(table_, second, to + kSize - kWords, largest);
    uint32_t factors[2][Factors::kMany];
    factors_.of_part(factors);
    const bool in_two_steps = factors_.in_two_steps();
    meanwhile();
    if (Codes::has_nan(largest)) {
      pin<kSize>(to);  // so that nothing is kept for what is rare
#pragma unroll
      for (uint32_t& pair : to) Codes::put_nan(pair);
    }
    if (in_two_steps) {
#pragma unroll
      for (uint32_t& pair : to) pair = mul_bf16(pair, Codes::unit());
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      to[i] = mul_bf16(to[i], factors[i % 2][(half * kWords + i) * Factors::kMany / (2 * kWords)]);
  }

  const Memory& table_;
  Factors factors_;
  float accumulators_[kTile.cols / 2] = {};
};

}  // namespace cadre::cuda::sm90
