#pragma once
#include "cuda/device/e2m1.h"
#include "cuda/portable/sixteens_part.cuh"

// Scales of blocks of 16, by twos, and where the codes of a lane go, or the numbers that they say.
namespace cadre::cuda::portable {

/// The scales of two blocks of a format whose scales are e4m3, and what their numbers are
/// multiplied by.
template <class Codes>
struct TwoScales {
  using Scale = typename Codes::Row::Scale;

  uint32_t codes;
  float multipliers[2];
  bool beyond;  ///< there is a NaN, or a product that is too large

  /// From amaxes, as halves with any sign.
  __device__ TwoScales(uint32_t both, const ExpertFactors& expert) {
    const float amax[2] = {__uint_as_float(both << 16 & formats::kMagnitudeBits),
                           __uint_as_float(both & 0x7fff'0000u)};
    codes = encode_pair<Scale>(formats::mul(amax[0], expert.of_amax),
                               formats::mul(amax[1], expert.of_amax));
    const float2 numbers = decode_pair<Scale>(codes);
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      // As Row::multiplier, near one.
      const float product = formats::mul(k == 0 ? numbers.x : numbers.y, expert.scale);
      multipliers[k] = fminf(formats::reciprocal(product), formats::kLargestFloat);
      largest = max(largest, __float_as_uint(formats::mul(amax[k], multipliers[k])));
    }
    beyond = largest >= __float_as_uint(expert.too_large);
  }
  __device__ uint8_t code(int k) const { return uint8_t(codes >> (8 * k)); }
  /// What they say, as a pair of bf16.
  __device__ static uint32_t numbers(uint32_t of_two) {
    const float2 both = decode_pair<Scale>(of_two);
    return pair_of_numbers(both.x, both.y);
  }
  /// The limit of numbers that are in the low half; all ones in the high one if they are NaN, as
  /// all of such a block is. Their codes are those of six times one.
  __device__ uint32_t limit(int k, const ExpertFactors& expert) {
    if (code(k) == Scale::kNanCode) {
      multipliers[k] = 1.0f;
      return ~0u << 16;
    }
    if (expert.too_large == 0) {
      // As Row::multiplier, whose division powers of two spare.
      const float product = formats::mul(decode_pair<Scale>(code(k)).x, expert.scale);
      const float by = expert.scale < 1 ? formats::pow2(80) : formats::pow2(-80);
      multipliers[k] = fminf(formats::mul(formats::reciprocal(formats::mul(product, by)), by),
                             formats::kLargestFloat);
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

/// What the codes of a row are multiplied by in a decoded copy: the scales of columns, in pairs.
using PairScales = uint32_t[kChunk / 2];

/// Rows of codes that a lane stores, or of the numbers that they say, from that row on.
template <class Codes>
struct RowsOfCodes {
  const SixteensCopy& copy;
  uint8_t* to;
  int rows;

  __device__ RowsOfCodes(const SixteensCopy& of, const ColumnsPlace& at, int row, int count)
      : copy(of),
        to(as_one_number(of.codes + bytes_to(at.part.expert, of.expert) + bytes_to(row, of.pitch) +
                         bytes_to(at.col, is_decoded<Codes>(of) ? 16 : 4) / 8)),
        rows(count) {}
  __device__ void store(int i, uint32_t codes) const { store_word_below(i, rows, row(i), codes); }
  __device__ void store_numbers(int i, uint32_t codes, const PairScales& scales) const {
    store_words_below(i, rows, row(i), e2m1_numbers(codes, scales));
  }
  /// Of a row that has one scale for all its columns here; scales() makes a pair of it.
  __device__ void store_row(int i, uint32_t codes, auto&& scales) const {
    if (!is_decoded<Codes>(copy)) return store(i, codes);
    const uint32_t two = scales();
    store_numbers(i, codes, {two, two, two, two});
  }
  /// The same rows eight columns on, of which so many are there.
  __device__ RowsOfCodes next(int count) const {
    RowsOfCodes others = *this;
    others.to += is_decoded<Codes>(copy) ? sizeof(uint4) : sizeof(uint32_t);
    others.rows = count;
    return others;
  }
  /// Codes of whole blocks.
  __device__ void store_block(int i, uint2 codes) const {
    store_words_below(i, rows, row(i), codes);
  }

 private:
  __device__ uint8_t* row(int i) const { return to + short_way_to(i, uint32_t(copy.pitch)); }
};

}  // namespace cadre::cuda::portable
