#pragma once
#include <type_traits>

#include "cuda/device/matrices.h"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/output.cuh"
#include "cuda/sm90/packed_rows.h"
#include "formats/e8m0.h"
#include "formats/small_float.h"

// From packed codes in shared memory to pairs of bf16 numbers in registers. The bits of a code are
// put where bf16 has sign, exponent and mantissa. That is its number over a power of two, the unit,
// subnormal codes too; so one multiplication by unit times scale decodes it, exactly where the
// result is a bf16 number, else rounded once.
namespace cadre::cuda::sm90 {

/// Where sixteen bytes of a box lie whose rows have so many bytes.
template <int kRowBytes>
__device__ inline uint32_t swizzled_rows(int row, int sixteen) {
  if constexpr (kRowBytes == kAtomBytes)
    return swizzled(row, sixteen);
  else
    return kRowBytes == 64 ? swizzled_64(row, sixteen) : swizzled_32(row, sixteen);
}

template <DType kCode>
struct PackedCodes;

template <>
struct PackedCodes<DType::kE2m1> {
  static constexpr int kUnitExponent = 126;
  __device__ static float unit() { return 0x1p126f; }

  /// Of 32 codes of a row, the half-th such: of every eight the two that are a thread's in a
  /// fragment.
  template <int kRowBytes>
  __device__ static void read(const uint8_t* rows, int row, int half, uint32_t (&pairs)[4]) {
    const uint4 words = *reinterpret_cast<const uint4*>(rows + swizzled_rows<kRowBytes>(row, half));
    const uint32_t eights[4] = {words.x, words.y, words.z, words.w};
    const uint32_t mine = 0x4440 | threadIdx.x % 4;  // that byte of a word, and zeros
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = placed(__byte_perm(eights[i], 0, mine));
  }

 private:
  /// By products, since shifts and masks are done by the same part of an SM.
  __device__ static uint32_t placed(uint32_t byte) {
    return (byte * 0x0100'1000u & 0x8000'8000u) | (byte * 0x0004'0040u & 0x01c0'01c0u);
  }
};

template <>
struct PackedCodes<DType::kE4m3> {
  static constexpr int kUnitExponent = 120;
  __device__ static float unit() { return 0x1p120f; }

  /// As above, of codes of a byte.
  template <int kRowBytes>
  __device__ static void read(const uint8_t* rows, int row, int half, uint32_t (&pairs)[4]) {
    const uint32_t lane = threadIdx.x % 4;
    const uint32_t mine =
        0x1000 * (2 * lane + 1) + 0x10 * (2 * lane);  // two of eight, as high bytes
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 words =
          *reinterpret_cast<const uint4*>(rows + swizzled_rows<kRowBytes>(row, 2 * half + i));
      const uint32_t both[2] = {__byte_perm(words.x, words.y, mine),
                                __byte_perm(words.z, words.w, mine)};
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        const uint32_t magnitudes = both[eight] >> 4 & kMagnitudes;
        pairs[2 * i + eight] = (both[eight] & 0x8000'8000u) | magnitudes;
        largest = __vmaxu2(largest, magnitudes);
      }
    }
    if (((largest + kLast) & kBehind) != 0) put_nans(pairs);
  }

 private:
  static constexpr uint32_t kMagnitudes = 0x07f0'07f0u;  // of a NaN: all ones
  static constexpr uint32_t kLast = 0x0010'0010u, kBehind = 0x0800'0800u;

  __device__ static void put_nans(uint32_t (&pairs)[4]) {
#pragma unroll
    for (uint32_t& pair : pairs)
      pair |= (((pair & kMagnitudes) + kLast) & kBehind) / 0x0800 * 0x7fc0;
  }
};

/// The scales of the two rows of w that a thread decodes. In rounds of some parts of 64 codes four
/// lanes read two of each row each, a round before they are needed, and show them to each other.
template <class Format>
class PackedFactors {
 public:
  static constexpr int kBlock = Format::kInfo.block;
  static constexpr int kMany = kBlock < kPackedDepth ? kPackedDepth / kBlock : 1;  ///< of a part
  static constexpr int kOfHalf = kMany > 2 ? kMany / 2 : 1;

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
      rows_[i] = of_expert + (row < last ? row : last) / scales.rows * scales.row_step;
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
  /// Of half a part, of both rows: times the unit, unless that is no number for one of the warp's.
  template <int kHalf>
  __device__ void of_half(uint32_t (&factors)[2][kOfHalf]) const {
#pragma unroll
    for (int i = 0; i < 2 * kOfHalf; ++i) {
      const int at = kMany < 2 ? 0 : kHalf * kOfHalf + i % kOfHalf;
      const uint32_t both = shown_[i / kOfHalf][at / kOfLane];
      factors[i / kOfHalf][i % kOfHalf] = __byte_perm(both, 0, at % kOfLane == 0 ? 0x1010 : 0x3232);
    }
  }
  /// Whether codes take the unit and then the factor.
  __device__ bool in_two_steps() const { return in_two_steps_; }

 private:
  using Scale = typename Format::Scale;
  using Codes = PackedCodes<Format::kInfo.element>;
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
    bool too_large = false;
#pragma unroll
    for (int i = 0; i < 2 * kOfLane; ++i)
      too_large |= !is_finite_with_unit(read_[i / kOfLane][i % kOfLane]);
    in_two_steps_ = __any_sync(0xffffffff, too_large) != 0;
#pragma unroll
    for (int row = 0; row < 2; ++row)
      mine_[row] = bits(read_[row][0]) | bits(read_[row][kOfLane - 1]) << 16;
  }
  __device__ static bool is_finite_with_unit(uint32_t code) {
    if constexpr (std::is_same_v<Scale, formats::E8m0>)
      return code < 255 - Codes::kUnitExponent;
    else
      return formats::magnitude(formats::mul(decode(code), Codes::unit())) !=
             formats::kInfinityBits;
  }
  /// The factor of a scale, as bf16.
  __device__ uint32_t bits(uint32_t code) const {
    if constexpr (std::is_same_v<Scale, formats::E8m0>)
      if (!in_two_steps_) return (code + Codes::kUnitExponent) << 7;
    return formats::bits_of(formats::mul(decode(code), in_two_steps_ ? 1.0f : Codes::unit())) >> 16;
  }
  __device__ static float decode(uint32_t code) {
    return Scale::decode(typename Scale::Code(code));
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
