#pragma once
#include "cuda/device/chunk.h"
#include "formats/ieee.h"

// Largest magnitudes of elements as they are stored, two of bf16 or f16 at a time. A NaN is larger
// than anything.
namespace cadre::cuda {

/// The larger of each of two pairs of halves, of the second by magnitude.
template <class Pair, class Raw>
__device__ inline uint32_t larger_halves(uint32_t largest, uint32_t word) {
  const auto pair = [](uint32_t bits) {
    Raw raw;
    raw.x = uint16_t(bits), raw.y = uint16_t(bits >> 16);
    return Pair(raw);
  };
  const Raw both = __hmax2_nan(pair(largest), __habs2(pair(word)));
  return both.x | uint32_t(both.y) << 16;
}

/// The larger of what was found and the magnitudes in a word.
template <DType kDType>
__device__ inline uint32_t larger(uint32_t largest, uint32_t word) {
  if constexpr (kDType == DType::kF32)
    return max(largest, word & formats::kMagnitudeBits);
  else if constexpr (kDType == DType::kBf16)
    return larger_halves<__nv_bfloat162, __nv_bfloat162_raw>(largest, word);
  else
    return larger_halves<__half2, __half2_raw>(largest, word);
}

/// Of each of eight neighbouring columns.
template <DType kDType>
struct ColumnMagnitudes {
  static constexpr int kWords = kDType == DType::kF32 ? 8 : 4;
  uint32_t words[kWords] = {};

  __device__ void add(const Chunk& chunk) {
    for (int i = 0; i < kWords; ++i) words[i] = larger<kDType>(words[i], word(chunk, i));
  }
  /// As bits of an fp32.
  __device__ uint32_t of_column(int k) const {
    if constexpr (kDType == DType::kF32) return words[k];
    const float2 pair = pair_of(kDType, words[k / 2]);
    return formats::magnitude(k % 2 == 0 ? pair.x : pair.y);
  }
  __device__ uint32_t of_all() const {
    ColumnMagnitudes folded = *this;
    for (int half = kWords / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i)
        folded.words[i] = larger<kDType>(folded.words[i], folded.words[i + half]);
    return max(folded.of_column(0), kDType == DType::kF32 ? 0u : folded.of_column(1));
  }
};

}  // namespace cadre::cuda
