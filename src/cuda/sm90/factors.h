#pragma once
#include "cuda/device/barrier.h"
#include "cuda/sm90/tile.h"
#include "formats/ieee.h"

// Factors of block-scaled products. The codes of a stage are one block along the contraction, so
// its sums are multiplied by one factor a column of the tile: the scale of a row of the batch times
// that of the weight's block. A scale warp writes the factors of a stage for the consumers, the
// sixteen bytes that a thread reads at once side by side with those of its three neighbours.
namespace cadre::cuda::sm90 {

/// A power of two is written as the exponent of its fp32, in a byte.
constexpr int factor_bytes(Scaling scaling) { return scaling == Scaling::kPowers ? 1 : 4; }

/// Which factor of a stage is that of column `col` of the tile. Thread t of a warp has columns
/// 2 (t % 4) and the next of every eight: see Wgmma.
constexpr int factor_place(Scaling scaling, int col) {
  const int wide = 16 / factor_bytes(scaling), eights = wide / 2;
  return col / 8 / eights * 4 * wide + col % 8 / 2 * wide + col / 8 % eights * 2 + col % 2;
}

/// Scales and factors of all stages in shared memory, where a tile has them.
template <Tile kTile>
struct StageFactors {
  __device__ float* scales_of(int) { return nullptr; }
  __device__ void init_barriers() {}
};
template <Tile kTile>
requires(kTile.scaling != Scaling::kNone) struct StageFactors<kTile> {
  static constexpr Scaling kScaling = kTile.scaling;

  alignas(16) float scales[kTile.stages][kTile.cols + 4];  ///< they begin up to three too early
  alignas(16) uint8_t factors[kTile.stages][kTile.cols * factor_bytes(kScaling)];
  Barrier full[kTile.stages];  ///< the factors of a stage are written

  __device__ float* scales_of(int stage) { return scales[stage]; }
  __device__ void init_barriers() {
    for (Barrier& barrier : full) init(barrier, 1);
  }

  /// By the scale warp. Where the problem promises powers of two, a factor below 2^-126 counts as
  /// zero, and one that is none as infinite, so that nobody takes the results for numbers.
  __device__ void put(int stage, int col, float factor) {
    const int at = factor_place(kScaling, col);
    if constexpr (kScaling == Scaling::kPowers)
      factors[stage][at] = exponent_of(formats::bits_of(factor));
    else
      reinterpret_cast<float*>(factors[stage])[at] = factor;
  }

  __device__ static uint8_t exponent_of(uint32_t bits) {
    constexpr uint32_t kLeast = 0x00800000, kSignAndFraction = 0x807fffff;
    const bool is_none = bits >= kLeast && (bits & kSignAndFraction) != 0;
    return is_none ? 0xff : uint8_t(bits >> 23);
  }

  /// A thread's factors of so many groups of eight columns: sixteen bytes.
  static constexpr int kEights = 8 / factor_bytes(kScaling);
  __device__ uint4 of_thread(int stage, int unit) const {
    const int at = 4 * unit + int(threadIdx.x) % 4;
    return reinterpret_cast<const uint4*>(factors[stage])[at];
  }
};

/// Factor `i` of sixteen bytes' worth.
template <Scaling kScaling>
__device__ inline float factor_of(const uint4& unit, int i) {
  const uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
  if (kScaling == Scaling::kFloats) return formats::float_of(words[i]);
  const int up = 23 - 8 * (i % 4);  // from its byte to the exponent
  const uint32_t word = words[i / 4];
  return formats::float_of((up < 0 ? word >> -up : word << up) & formats::kInfinityBits);
}

}  // namespace cadre::cuda::sm90
