#pragma once
#include "cuda/device/e2m1.h"
#include "cuda/device/magnitude.h"
#include "cuda/portable/patch_scales.cuh"
#include "formats/hadamard.h"

// What a thread that quantises blocks of 16 has in registers: 16 rows of eight columns of bf16, and
// the scales of eight blocks.
namespace cadre::cuda::portable {

constexpr int kSixteen = 16;

/// 16 rows of four words.
struct ColumnPatch {
  uint32_t rows[kSixteen][kChunk / 2];

  __device__ void set(int i, uint4 row) {
    rows[i][0] = row.x, rows[i][1] = row.y, rows[i][2] = row.z, rows[i][3] = row.w;
  }
  /// The largest magnitudes of rows 2 i and 2 i + 1, as halves with any sign.
  __device__ uint32_t largest_of_rows(int i) const {
    const auto of_row = [&](const uint32_t(&row)[kChunk / 2]) {
      return larger<DType::kBf16>(larger<DType::kBf16>(row[0], row[1]),
                                  larger<DType::kBf16>(row[2], row[3]));
    };
    const uint32_t first = of_row(rows[2 * i]), second = of_row(rows[2 * i + 1]);
    return larger<DType::kBf16>(pick_bytes(first, second, 0x5410),
                                pick_bytes(first, second, 0x7632));
  }
  /// The same of columns.
  __device__ uint32_t largest_of_columns(int i) const {
    uint32_t largest = rows[0][i];
#pragma unroll
    for (const auto& row : rows) largest = larger<DType::kBf16>(largest, row[i]);
    return largest;
  }
  /// The Hadamard transform of each column. Of the last sums, a quarter is rounded: the same, but
  /// for sums that are infinite, whose expert has the codes of an infinite number all the same.
  __device__ void transform() {
    using formats::Hadamard16;
    constexpr int kHalf = Hadamard16::kPoints / 2;
#pragma unroll
    for (int pair = 0; pair < kChunk / 2; ++pair) {
      float v[2][Hadamard16::kPoints];
#pragma unroll
      for (int i = 0; i < Hadamard16::kPoints; ++i) {
        const float2 both = pair_of(DType::kBf16, rows[i][pair]);
        v[0][i] = both.x, v[1][i] = both.y;
      }
#pragma unroll
      for (auto& column : v) {
        Hadamard16::sign(column);
        Hadamard16::add_pairs<kHalf>(column);
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
          const float a = column[i], b = formats::mul(column[i + kHalf], 0.25f);
          column[i] = formats::fma(a, 0.25f, b);
          column[i + kHalf] = formats::fma(a, 0.25f, -b);
        }
      }
#pragma unroll
      for (int i = 0; i < Hadamard16::kPoints; ++i)
        rows[i][pair] = bits_of_pair(DType::kBf16, v[0][i], v[1][i]);
    }
  }
};

/// The scales of eight blocks of a format whose scales are e4m3, and what their numbers are
/// multiplied by.
template <class Row, class Element>
struct EightScales {
  using Scale = typename Row::Scale;

  uint32_t codes[2];
  float multipliers[kChunk];
  bool beyond;  ///< there is a NaN, or a product of seven or more

  /// From amaxes, and what they are multiplied by.
  __device__ EightScales(const float (&amax)[kChunk], const formats::ExpertScale& expert,
                         float of_amax) {
    float numbers[kChunk];
#pragma unroll
    for (int k = 0; k < kChunk; ++k) numbers[k] = formats::mul(amax[k], of_amax);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      codes[i] = encode_four<Scale>(numbers[4 * i], numbers[4 * i + 1], numbers[4 * i + 2],
                                    numbers[4 * i + 3]);
    decode(numbers);
#pragma unroll
    for (int k = 0; k < kChunk; ++k) multipliers[k] = formats::mul(numbers[k], expert.scale);
    // As Row::multiplier, whose division powers of two spare.
    const float by = expert.scale < formats::pow2(-90)  ? formats::pow2(80)
                     : expert.scale > formats::pow2(90) ? formats::pow2(-80)
                                                        : 1.0f;
    if (by == 1.0f) {
#pragma unroll
      for (float& m : multipliers) m = fminf(formats::reciprocal(m), formats::kLargestFloat);
    } else {
#pragma unroll
      for (float& m : multipliers)
        m = fminf(formats::mul(formats::reciprocal(formats::mul(m, by)), by),
                  formats::kLargestFloat);
    }
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < kChunk; ++k)
      largest = max(largest, __float_as_uint(formats::mul(amax[k], multipliers[k])));
    beyond = largest >= __float_as_uint(7.0f);
  }
  __device__ uint8_t code(int k) const { return uint8_t(codes[k / 4] >> (8 * (k % 4))); }
  __device__ void decode(float (&numbers)[kChunk]) const {
#pragma unroll
    for (int k = 0; k < kChunk; k += 2) {
      const float2 both = decode_pair<Scale>(codes[k / 4] >> (8 * (k % 4)) & 0xffff);
      numbers[k] = both.x, numbers[k + 1] = both.y;
    }
  }
  /// The limit of numbers that are in the low half; all ones in the high one if they are NaN, as
  /// all of such a block is. Their codes are those of six times one.
  __device__ uint32_t limit(int k) {
    if (code(k) == Scale::kNanCode) {
      multipliers[k] = 1.0f;
      return ~0u << 16;
    }
    return limit_of(multipliers[k]);
  }
};

/// A pair of numbers with the limits of their blocks.
__device__ inline uint32_t limited_pair(uint32_t pair, uint32_t first, uint32_t second) {
  constexpr uint32_t kSix = 0x40c0'40c0u;
  const uint32_t nan = pick_bytes(first, second, 0x7632);
  const uint32_t limited = limited_halves(pair, pick_bytes(first, second, 0x5410));
  return (limited & ~nan) | (kSix & nan);
}

}  // namespace cadre::cuda::portable
