#pragma once
#include <cstring>

#include "cuda/device/chunk.h"
#include "formats/ieee.h"

// Largest magnitudes of elements as they are stored, two of bf16 or f16 at a time. A NaN is larger
// than anything.
namespace cadre::cuda {

/// The larger of each of two pairs of halves, of the second by magnitude.
template <class Pair>
__device__ inline uint32_t larger_halves(uint32_t largest, uint32_t word) {
  static_assert(sizeof(Pair) == sizeof(uint32_t));
  Pair pairs[2];
  std::memcpy(static_cast<void*>(&pairs[0]), &largest, sizeof(Pair));
  std::memcpy(static_cast<void*>(&pairs[1]), &word, sizeof(Pair));
  const Pair both = __hmax2_nan(pairs[0], __habs2(pairs[1]));
  std::memcpy(&largest, &both, sizeof(Pair));
  return largest;
}

/// The larger of what was found and the magnitudes in a word.
template <DType kDType>
__device__ inline uint32_t larger(uint32_t largest, uint32_t word) {
  if constexpr (kDType == DType::kF32)
    return max(largest, word & formats::kMagnitudeBits);
  else if constexpr (kDType == DType::kBf16)
    return larger_halves<__nv_bfloat162>(largest, word);
  else
    return larger_halves<__half2>(largest, word);
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
