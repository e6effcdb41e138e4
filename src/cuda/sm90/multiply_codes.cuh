#pragma once
#include "cuda/sm90/multiply.cuh"

namespace cadre::cuda::sm90 {

/// Products of 8-bit codes in blocks of kTile.depth along the contraction, both operands in shared
/// memory. Hopper's adder of codes keeps fewer bits than fp32 has, so the products of a stage are
/// summed alone, and these sums, times the factor of their column, are added to the totals. While
/// one consumer does that, the products of the other run.
template <Tile kTile>
class MultiplyCodes {
 public:
  static_assert(kTile.a.dtype == DType::kE4m3 && kTile.a.k_major && kTile.b.k_major);
  static constexpr int kRegisters = kConsumerRegisters;  ///< of a thread

  __device__ explicit MultiplyCodes(const auto& /*params*/) {}

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
  static constexpr int kEights = StageFactors<kTile>::kEights;

  template <int kWidth>
  __device__ void multiply_width(StageRing<kTile>& ring, const TileRecord& tile, int consumer,
                                 auto&& meanwhile, auto&& beside) {
    float sums[kWidth / 2] = {};  // of a stage: no registers of a whole tile's
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) totals_[i] = 0;
    for (int depth = 0; depth < tile.depth; depth += kTile.depth, ring.at.next()) {
      ring.wait_full();
      multiply_stage(ring.stage(), consumer, sums);
      beside();
      if (depth + kTile.depth >= tile.depth) meanwhile();
      add_stage(ring, sums);
    }
  }

  template <int kCount>
  __device__ static void multiply_stage(const Stage& stage, int consumer, float (&sums)[kCount]) {
    const uint64_t a = matrix_descriptor<true>(stage.a + consumer * kTile.consumer_bytes(), 0);
    const uint64_t b = matrix_descriptor<true>(stage.b, 0);
    pin<kCount>(sums);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      WgmmaOfCodes<2 * kCount, kTile.b.dtype>::multiply_add(sums, a + k * kDescriptorStep<true>,
                                                            b + k * kDescriptorStep<true>, k != 0);
    wgmma_commit();
    pin<kCount>(sums);
  }

  /// Waits for the products of a stage, frees it, and adds them to the totals. Powers of two are so
  /// few bytes that they are read before the products are done; floats would not find room.
  template <int kCount>
  __device__ void add_stage(const StageRing<kTile>& ring, float (&sums)[kCount]) {
    constexpr int kUnits = (kCount / 4 + kEights - 1) / kEights;
    constexpr bool kReadsFirst = kTile.scaling == Scaling::kPowers;
    const int stage = ring.at.at;
    const auto free = [&] {
      __syncwarp();  // no lane reads factors any more
      ring.release(stage);
    };
    uint4 units[kUnits];
    wait(ring.factors.full[stage], ring.at.parity);
#pragma unroll
    for (int u = 0; u < kUnits && kReadsFirst; ++u) units[u] = ring.factors.of_thread(stage, u);
    wgmma_wait<0>();
    pin<kCount>(sums);
    if constexpr (kReadsFirst) free();
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if constexpr (!kReadsFirst) units[u] = ring.factors.of_thread(stage, u);
      add_unit(units[u], u, sums);
    }
    if constexpr (!kReadsFirst) free();
  }

  /// Of columns that share a unit of factors.
  template <int kCount>
  __device__ void add_unit(const uint4& unit, int u, const float (&sums)[kCount]) {
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      const int at = 4 * (u * kEights + i);
      if (at >= kCount) break;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        totals_[at + j] = formats::fma(sums[at + j], factor_of<kTile.scaling>(unit, 2 * i + j % 2),
                                       totals_[at + j]);
    }
  }

  float totals_[kTile.cols / 2] = {};
};

}  // namespace cadre::cuda::sm90
