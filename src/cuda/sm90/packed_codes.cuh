#pragma once
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
  static constexpr float kUnit = 0x1p126f;

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
  static constexpr float kUnit = 0x1p120f;

  template <int kRowBytes>
  __device__ static void read(const uint8_t* rows, int row, int half, uint32_t (&pairs)[4]) {
    const int lane = int(threadIdx.x % 4);
    const uint32_t mine = lane % 2 == 0 ? 0x1404 : 0x3424;  // two bytes above zeros
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint8_t* eight = rows + swizzled_rows<kRowBytes>(row, 2 * half + i / 2) + i % 2 * 8;
      const uint32_t both =
          __byte_perm(reinterpret_cast<const uint32_t*>(eight)[lane / 2], 0, mine);
      const uint32_t magnitudes = both >> 4 & kMagnitudes;
      pairs[i] = (both & 0x8000'8000u) | magnitudes;
      largest = __vmaxu2(largest, magnitudes);
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

/// The scales of the two rows of w that a thread decodes. Of every four parts of 64 codes a lane of
/// four reads those of one, a round before they are needed, and shows them to the others.
template <class Format>
class PackedFactors {
 public:
  static constexpr int kBlock = Format::kInfo.block;
  static constexpr int kMany = kBlock < kPackedDepth ? kPackedDepth / kBlock : 1;  ///< of a part
  static constexpr int kOfHalf = kMany > 2 ? kMany / 2 : 1;

  __device__ PackedFactors(const PackedScales& scales, const TileRecord& tile, int consumer)
      : col_step_(scales.col_step), cols_(scales.cols) {
    const char* of_expert = scales.discrete != nullptr
                                ? static_cast<const char*>(scales.discrete[tile.expert])
                                : static_cast<const char*>(scales.data) + tile.expert * scales.step;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tile.row + kConsumerRows * consumer + ThreadPlace::mine().row + 8 * i;
      of_row_[i] = row < tile.row_limit ? of_expert + row / scales.rows * scales.row_step : nullptr;
    }
    read(0);
  }

  /// Before the first half of a part, by a whole warp.
  __device__ void next_part(int part) {
    lane_ = int(threadIdx.x) % kWarp / 4 * 4 + part % 4;
    if (part % 4 != 0) return;
    take();
    read(part + 4);
  }
  /// Of that half, of both rows: times the unit, unless that is no number for one of the warp's.
  template <int kHalf>
  __device__ void of_half(uint32_t (&factors)[2][kOfHalf]) const {
#pragma unroll
    for (int i = 0; i < 2 * kOfHalf; ++i) {
      const int at = kMany < 2 ? 0 : kHalf * kOfHalf + i % kOfHalf;
      const uint32_t both = __shfl_sync(0xffffffff, pairs_[i / kOfHalf][at / 2], lane_);
      factors[i / kOfHalf][i % kOfHalf] = __byte_perm(both, 0, at % 2 == 0 ? 0x1010 : 0x3232);
    }
  }
  /// Whether codes take the unit and then the factor.
  __device__ bool in_two_steps() const { return in_two_steps_; }

 private:
  using Scale = typename Format::Scale;
  static constexpr float kUnit = PackedCodes<Format::kInfo.element>::kUnit;

  __device__ void read(int first_part) {
    const int part = first_part + int(threadIdx.x) % 4;
#pragma unroll
    for (int i = 0; i < 2 * kMany; ++i) {
      const int col = (kPackedDepth * part) / kBlock + i % kMany;
      const char* row = of_row_[i / kMany];
      read_[i / kMany][i % kMany] =
          row != nullptr && col < cols_
              ? *reinterpret_cast<const typename Scale::Code*>(row + col * col_step_)
              : typename Scale::Code();
    }
  }
  __device__ void take() {
    bool too_large = false;
#pragma unroll
    for (int i = 0; i < 2 * kMany; ++i)
      too_large |= formats::magnitude(formats::mul(scale(i), kUnit)) == formats::kInfinityBits;
    in_two_steps_ = __any_sync(0xffffffff, too_large) != 0;
    const float unit = in_two_steps_ ? 1.0f : kUnit;
#pragma unroll
    for (int i = 0; i < 2 * kMany; i += kMany < 2 ? 1 : 2) {
      const uint32_t first = formats::bits_of(formats::mul(scale(i), unit));
      const uint32_t second = kMany < 2 ? 0 : formats::bits_of(formats::mul(scale(i + 1), unit));
      pairs_[i / kMany][i % kMany / 2] = __byte_perm(first, second, 0x7632);
    }
  }
  __device__ float scale(int i) const { return Scale::decode(read_[i / kMany][i % kMany]); }

  const char* of_row_[2];
  int64_t col_step_;
  int cols_;
  typename Scale::Code read_[2][kMany];  ///< of a round's part of this lane
  uint32_t pairs_[2][(kMany + 1) / 2];   ///< of the round before, as bf16
  bool in_two_steps_;
  int lane_;  ///< that shows those of the present part
};

}  // namespace cadre::cuda::sm90
