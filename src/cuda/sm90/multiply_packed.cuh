#pragma once
#include "cuda/sm90/multiply.cuh"
#include "cuda/sm90/packed_codes.cuh"
#include "cuda/sm90/packed_scales.cuh"

namespace cadre::cuda::sm90 {

/// Products of packed codes and bf16 rows in one set of accumulators, in the order of Multiply16. A
/// stage is one part of 64 codes of each row or several. A consumer decodes a part into registers,
/// wgmma's first operand, whose products are one group. Where two consumers have many columns each,
/// the codes of the next part are placed while the products of this one run, and scaled behind
/// them. Where consumers are many, of few columns each, others multiply while one decodes.
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
          if constexpr (kTile.consumers == kConsumers)
            multiply_ahead<kWidth>(ring, tile, consumer, beside);
          else
            multiply_in_turn<kWidth>(ring, tile, consumer, beside);
          meanwhile();
          pin<kWidth / 2>(accumulators_);
        });
  }
  /// A thread's accumulators from that column on.
  __device__ const float* accumulators(int col) const { return accumulators_ + col / 2; }

 private:
  static constexpr int kParts = kTile.depth / kPackedDepth;  // of a stage
  static constexpr int kLoaded = Codes::kWords;              // of half a part
  static constexpr int kHalf = 8, kPart = 2 * kHalf;         // registers of numbers
  using Factors = PackedFactors<Format, kParts, kDecoding == Decoding::kTable>;

  /// The codes of half a part: of the consumer's 64 rows.
  __device__ static void load(const Stage& stage, int half, int consumer,
                              uint32_t (&words)[kLoaded]) {
    constexpr int kRowBytes = kTile.consumer_bytes() / kConsumerRows;
    Codes::template load<kRowBytes>(stage.a + consumer * kTile.consumer_bytes(), half, words);
  }
  /// Of two halves. `largest` becomes the largest magnitudes, if there may be a NaN.
  __device__ void place(const uint32_t (&first)[kLoaded], const uint32_t (&second)[kLoaded],
                        uint32_t (&placed)[kPart], uint32_t& largest) const {
    largest = 0;
    Codes::place(table_, first, placed, largest);
    Codes::place(table_, second, placed + kHalf, largest);
  }
  /// From what place() left to numbers, with the factors of this part. `meanwhile()` is done once
  /// these are known.
  __device__ __forceinline__ void scale(uint32_t (&placed)[kPart], uint32_t largest,
                                        uint32_t (&numbers)[kPart], auto&& meanwhile) {
    const typename Factors::OfPart factors = factors_.of_part();
    const bool in_two_steps = factors_.in_two_steps();
    meanwhile();
    if (Codes::has_nan(largest)) {
      pin<kPart>(placed);  // so that nothing is kept for what is rare
#pragma unroll
      for (uint32_t& pair : placed) Codes::put_nan(pair);
    }
    if (in_two_steps) {
#pragma unroll
      for (uint32_t& pair : placed) pair = mul_bf16(pair, Codes::unit());
    }
#pragma unroll
    for (int i = 0; i < kPart; ++i)
      numbers[i] = mul_bf16(placed[i], factors.pair(i % 2, i * Factors::kMany / kPart));
  }
  /// Starts the products of a part of the stage.
  template <int kWidth>
  __device__ __forceinline__ void start(const Stage& stage, int part, uint32_t (&numbers)[kPart],
                                        bool adds) {
    const uint64_t b = matrix_descriptor<true>(stage.b + part * kTile.atom_bytes(), 0);
    pin<kWidth / 2>(accumulators_);
    pin<kPart>(numbers);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kPart / 4; ++k)
      WgmmaOfRegisters<kWidth>::multiply_add(accumulators_, numbers + 4 * k,
                                             b + k * kDescriptorStep<true>, adds || k != 0);
    wgmma_commit();
    pin<kWidth / 2>(accumulators_);
  }
  /// Waits until they are done.
  __device__ __forceinline__ static void finish(uint32_t (&numbers)[kPart]) {
    wgmma_wait<0>();
    pin<kPart>(numbers);
  }

  template <int kWidth>
  __device__ __forceinline__ void multiply_ahead(StageRing<kTile>& ring, const TileRecord& tile,
                                                 int consumer, auto&& beside) {
    static_assert(kParts == 1);
    uint32_t placed[kPart], numbers[kPart], largest;
    const auto place_part = [&](int depth) __attribute__((always_inline)) {
      uint32_t first[kLoaded], second[kLoaded];
      ring.wait_full();
      load(ring.stage(), 0, consumer, first);
      load(ring.stage(), 1, consumer, second);
      factors_.next_part(depth / kPackedDepth, 0);
      place(first, second, placed, largest);
    };
    place_part(0);
    for (int depth = 0; depth < tile.depth; depth += kTile.depth) {
      const int present = ring.at.at;
      scale(placed, largest, numbers, [] {});
      start<kWidth>(ring.stage(), 0, numbers, depth != 0);
      ring.at.next();
      beside();
      if (depth + kTile.depth < tile.depth) place_part(depth + kTile.depth);
      finish(numbers);
      ring.release(present);
    }
  }
  /// The first half of a part's codes, and its scales, are loaded before the products of the part
  /// before.
  template <int kWidth>
  __device__ __forceinline__ void multiply_in_turn(StageRing<kTile>& ring, const TileRecord& tile,
                                                   int consumer, auto&& beside) {
    uint32_t numbers[kPart], first[kLoaded];
    const auto begin_stage = [&](int depth) __attribute__((always_inline)) {
      ring.wait_full();
      load(ring.stage(), 0, consumer, first);
      factors_.next_part(depth / kPackedDepth, 0);
    };
    begin_stage(0);
    for (int depth = 0; depth < tile.depth; depth += kTile.depth) {
      const Stage stage = ring.stage();
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (part != 0 && depth + part * kPackedDepth >= tile.depth) break;
        uint32_t second[kLoaded], largest;
        load(stage, 2 * part + 1, consumer, second);
        place(first, second, numbers, largest);
        scale(
            numbers, largest, numbers, [&]() __attribute__((always_inline)) {
              if (part + 1 == kParts) return;
              load(stage, 2 * part + 2, consumer, first);
              factors_.next_part(depth / kPackedDepth, part + 1);
            });
        start<kWidth>(stage, part, numbers, part != 0 || depth != 0);
        finish(numbers);
      }
      ring.release(ring.at.at);
      ring.at.next();
      beside();
      if (depth + kTile.depth < tile.depth) begin_stage(depth + kTile.depth);
    }
  }

  const Memory& table_;
  Factors factors_;
  float accumulators_[kTile.cols / 2] = {};
};

}  // namespace cadre::cuda::sm90
