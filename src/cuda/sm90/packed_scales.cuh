#pragma once
#include "cuda/device/copy.h"
#include "cuda/device/matrices.h"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/packed_codes.cuh"
#include "cuda/sm90/packed_rows.h"
#include "formats/e8m0.h"
#include "formats/small_float.h"

// The block scales of packed weights, as the bf16 factors of the codes' bits.
namespace cadre::cuda::sm90 {

/// The factors of two scales, whose codes are the halves of a word, as bf16 in those halves.
template <class Scale, int kUnitExponent>
struct ScalePairs;

template <int kUnitExponent>
struct ScalePairs<formats::E8m0, kUnitExponent> {
  /// Whether unit times scale is a number, of all four.
  __device__ static bool take_unit(uint32_t first, uint32_t second) {
    constexpr uint32_t kRest = 0x8000 - (255 - kUnitExponent);
    return ((__vmaxu2(first, second) + (kRest | kRest << 16)) & 0x8000'8000u) == 0;
  }
  __device__ static uint32_t with_unit(uint32_t both) {
    constexpr uint32_t kUnit = kUnitExponent << 7;
    return (both << 7) + (kUnit | kUnit << 16);
  }
  __device__ static uint32_t alone(uint32_t both) {
    const auto number = [](uint32_t code) {
      return formats::bits_of(formats::E8m0::decode(uint8_t(code))) >> 16;
    };
    return number(both & 0xff) | number(both >> 16) << 16;
  }
};

template <int kUnitExponent>
struct ScalePairs<formats::E4m3, kUnitExponent> {
  __device__ static bool take_unit(uint32_t first, uint32_t second) {
    constexpr uint32_t kLeast = (255 - kUnitExponent) << 7, kRest = 0x8000 - kLeast;
    const uint32_t most = __vmaxu2(alone(first) & 0x7fff'7fffu, alone(second) & 0x7fff'7fffu);
    return ((most + (kRest | kRest << 16)) & 0x8000'8000u) == 0;
  }
  __device__ static uint32_t with_unit(uint32_t both) {
    return mul_bf16(alone(both), pair_of_units<kUnitExponent>());
  }
  __device__ static uint32_t alone(uint32_t both) {
    using Bits = CodeBits<DType::kE4m3>;
    uint32_t placed = Bits::placed(both << 8);
    Bits::put_nan(placed);
    return mul_bf16(placed, Bits::unit());
  }
};

/// The scales of the two rows of w that a thread decodes. In rounds of some parts of 64 codes four
/// lanes read two of each row each, a round before they are needed, and show them to each other.
template <class Format>
class PackedFactors {
 public:
  static constexpr int kBlock = Format::kInfo.block;
  static constexpr int kMany = kBlock < kPackedDepth ? kPackedDepth / kBlock : 1;  ///< of a part

  __device__ PackedFactors(const PackedScales& scales, const TileRecord& tile, int consumer)
      : col_step_(int(scales.col_step)),
        next_(int(threadIdx.x) % 4 * kOfLane),
        last_(scales.cols - 1) {
    const char* of_expert = scales.discrete != nullptr
                                ? static_cast<const char*>(scales.discrete[tile.expert])
                                : static_cast<const char*>(scales.data) + tile.expert * scales.step;
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // rows behind the last one have its scales
      const int row = tile.row + kConsumerRows * consumer + ThreadPlace::mine().row + 8 * i;
      const int last = tile.row_limit - 1;
      rows_[i] =
          in_registers(of_expert + (row < last ? row : last) / scales.rows * scales.row_step);
    }
    read();
  }

  /// Before a part is decoded, by a whole warp.
  __device__ void next_part(int part) {
    if (part % kRound == 0) {
      take();
      read();
    }
    const int lane = int(threadIdx.x) % kWarp / 4 * 4 + part % kRound * kLanes;
#pragma unroll
    for (int i = 0; i < 2 * kLanes; ++i)
      shown_[i / kLanes][i % kLanes] =
          __shfl_sync(0xffffffff, mine_[i / kLanes], lane + i % kLanes);
  }
  /// Of this part, of both rows: times the unit, unless that is no number for one of the warp's.
  __device__ void of_part(uint32_t (&factors)[2][kMany]) const {
#pragma unroll
    for (int i = 0; i < 2 * kMany; ++i) {
      const uint32_t both = shown_[i / kMany][i % kMany / kOfLane];
      factors[i / kMany][i % kMany] = __byte_perm(both, 0, i % kOfLane == 0 ? 0x1010 : 0x3232);
    }
  }
  /// Whether codes take the unit and then the factor.
  __device__ bool in_two_steps() const { return in_two_steps_; }

 private:
  using Scale = typename Format::Scale;
  using Pairs = ScalePairs<Scale, CodeBits<Format::kInfo.element>::kUnitExponent>;
  static constexpr int kOfLane = kMany < 2 ? 1 : 2, kLanes = kMany / kOfLane;
  static constexpr int kRound = 4 / kLanes;  ///< parts

  /// This lane's scales of the next round. Behind a row's last one is that again: there, codes are
  /// zero.
  __device__ void read() {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int at = (next_ + i < last_ ? next_ + i : last_) * col_step_;
#pragma unroll
      for (int row = 0; row < 2; ++row)
        read_[row][i] = *reinterpret_cast<const typename Scale::Code*>(rows_[row] + at);
    }
    next_ += 4 * kOfLane;
  }
  __device__ void take() {
    uint32_t both[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) both[row] = read_[row][0] | read_[row][kOfLane - 1] << 16;
    in_two_steps_ = __any_sync(0xffffffff, !Pairs::take_unit(both[0], both[1])) != 0;
#pragma unroll
    for (int row = 0; row < 2; ++row) mine_[row] = Pairs::with_unit(both[row]);
    if (!in_two_steps_) return;
#pragma unroll
    for (int row = 0; row < 2; ++row) mine_[row] = Pairs::alone(both[row]);
  }

  const char* rows_[2];
  int col_step_;                    ///< a row of them takes less than 2 GiB
  int next_, last_;                 ///< columns of scales
  uint32_t read_[2][kOfLane];       ///< codes of this lane for the next round
  uint32_t mine_[2];                ///< this lane's factors for this round, as bf16
  uint32_t shown_[2][kLanes] = {};  ///< those of this part
  bool in_two_steps_ = false;
};

}  // namespace cadre::cuda::sm90
