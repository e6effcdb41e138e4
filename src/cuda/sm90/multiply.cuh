#pragma once
#include <type_traits>

#include "cuda/sm90/stages.h"

// Multiply: how a consumer's accumulators come from the stages of a tile.
namespace cadre::cuda::sm90 {

/// Lets all stages of a tile pass. A lane that arrived before another had looked would let the
/// producer go a whole round ahead of that one.
template <Tile kTile>
__device__ inline void skip(StageRing<kTile>& ring, const TileRecord& tile) {
  for (int depth = 0; depth < tile.depth; depth += kTile.depth, ring.at.next()) {
    ring.wait_full();
    __syncwarp();
    ring.release(ring.at.at);
  }
}

/// first, first + step, ..., last.
struct Widths {
  int first, last, step;
};
template <int kWidth>
using Width = std::integral_constant<int, kWidth>;

/// Calls work(Width) with the narrowest of these widths that covers so many columns.
template <Widths kWidths>
__device__ __forceinline__ void with_width(int cols, auto&& work) {
  constexpr int kFirst = kWidths.first, kLast = kWidths.last, kStep = kWidths.step;
  if constexpr (kFirst < kLast) {
    constexpr int kMiddle = (kFirst + kLast) / 2 / kStep * kStep;
    if (cols <= kMiddle)
      with_width<Widths{kFirst, kMiddle, kStep}>(cols, work);
    else
      with_width<Widths{kMiddle + kStep, kLast, kStep}>(cols, work);
  } else {
    work(Width<kFirst>());
  }
}

/// Products of 16-bit operands, both in shared memory, in one set of accumulators: 64 rows of A by
/// as many columns as the tile has, one wgmma of each width.
template <Tile kTile>
class Multiply16 {
 public:
  static_assert(kTile.a.dtype == kTile.b.dtype && element_bytes(kTile.a.dtype) == 2);
  static constexpr int kRegisters = kTile.consumer_registers();  ///< of a thread

  __device__ explicit Multiply16(const auto& /*params*/) {}

  /// All products of a consumer's rows of a tile. One group stays in flight while the next stage is
  /// awaited, and the last while `meanwhile()` is done. `beside()` is done while the products of a
  /// whole stage run, once for each.
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
  static constexpr int kDepthStep = 32 / element_bytes(kTile.a.dtype);  // of one wgmma
  static constexpr int kSteps = kTile.depth / kDepthStep;

  template <int kWidth>
  __device__ void multiply_width(StageRing<kTile>& ring, const TileRecord& tile, int consumer,
                                 auto&& meanwhile, auto&& beside) {
    constexpr int kLastStage = kTile.any_depth ? kTile.depth : 0;
    int before = 0;
    for (int depth = 0; depth < tile.depth - kLastStage; depth += kTile.depth, ring.at.next()) {
      ring.wait_full();
      multiply_stage<kWidth, kSteps>(ring.stage(), consumer, depth != 0);
      wgmma_wait<1>();
      if (depth != 0) ring.release(before);
      before = ring.at.at;
      beside();
    }
    if constexpr (kTile.any_depth) {
      ring.wait_full();
      multiply_last<kWidth>(ring.stage(), consumer, tile);
      wgmma_wait<1>();
      if (tile.depth > kTile.depth) ring.release(before);
      before = ring.at.at;
      ring.at.next();
    }
    meanwhile();
    wgmma_wait<0>();
    pin<kWidth / 2>(accumulators_);
    ring.release(before);
  }

  /// The last stage of a tile, as deep as it is.
  template <int kWidth, int kDeep = 1>
  __device__ void multiply_last(const Stage& stage, int consumer, const TileRecord& tile) {
    if constexpr (kDeep < kSteps) {
      if ((tile.depth - 1) % kTile.depth >= kDepthStep * kDeep)
        return multiply_last<kWidth, kDeep + 1>(stage, consumer, tile);
    }
    multiply_stage<kWidth, kDeep>(stage, consumer, tile.depth > kTile.depth);
  }

  /// Adds the products of one stage, kDeep steps deep, or begins with them.
  template <int kWidth, int kDeep>
  __device__ void multiply_stage(const Stage& stage, int consumer, bool adds) {
    constexpr bool kMajorA = kTile.a.k_major, kMajorB = kTile.b.k_major;
    const uint64_t a = matrix_descriptor<kMajorA>(stage.a + consumer * kTile.consumer_bytes(),
                                                  kTile.panel_bytes());
    const uint64_t b = matrix_descriptor<kMajorB>(stage.b, kTile.panel_bytes());
    pin<kWidth / 2>(accumulators_);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDeep; ++k)
      Wgmma<kWidth, kTile.a.dtype>::template multiply_add<kMajorA, kMajorB>(
          accumulators_, a + k * kDescriptorStep<kMajorA>, b + k * kDescriptorStep<kMajorB>,
          adds || k != 0);
    wgmma_commit();
    pin<kWidth / 2>(accumulators_);
  }

  float accumulators_[kTile.cols / 2] = {};
};

}  // namespace cadre::cuda::sm90
