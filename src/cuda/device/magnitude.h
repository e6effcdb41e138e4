#pragma once
#include <cstring>
#include <type_traits>

#include "cuda/device/chunk.h"
#include "cuda/device/small_float.h"
#include "formats/ieee.h"

// Elements as they are stored, two of bf16 or f16 at a time: products, and largest magnitudes, of
// which a NaN is larger than anything.
namespace cadre::cuda {

/// The larger magnitude of each of two pairs of halves, with any sign.
template <class Pair>
__device__ inline uint32_t larger_halves(uint32_t first, uint32_t second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  uint32_t both;
  if constexpr (std::is_same_v<Pair, __half2>)
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(both) : "r"(first), "r"(second));
  else
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(first), "r"(second));
  return both;
#else
  static_assert(sizeof(Pair) == sizeof(uint32_t));
  Pair pairs[2];
  std::memcpy(static_cast<void*>(&pairs[0]), &first, sizeof(Pair));
  std::memcpy(static_cast<void*>(&pairs[1]), &second, sizeof(Pair));
  const Pair both = __hmax2_nan(__habs2(pairs[0]), __habs2(pairs[1]));
  std::memcpy(&first, &both, sizeof(Pair));
  return first;
#endif
}

/// Two pairs of bf16 numbers, multiplied.
__device__ inline uint32_t pair_product(uint32_t pair, uint32_t factors) {
#ifdef __CUDA_ARCH__
  uint32_t products;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;"
      : "=r"(products)
      : "r"(pair), "r"(factors), "r"(0x8000'8000u));
  return products;
#else
  const float2 x = pair_of(DType::kBf16, pair), by = pair_of(DType::kBf16, factors);
  return bits_of_pair(DType::kBf16, x.x * by.x, x.y * by.y);
#endif
}

/// Two fp32 numbers that are bf16 numbers, as a pair of them.
__device__ inline uint32_t pair_of_numbers(float first, float second) {
  return pick_bytes(__float_as_uint(first), __float_as_uint(second), 0x7632);
}

/// Two bf16 numbers times powers of two. The products are bf16 numbers, but for those so small that
/// their codes are zero.
__device__ inline uint32_t scaled_pair(uint32_t pair, float first, float second) {
  return pair_product(pair, pair_of_numbers(first, second));
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

/// Of two lines, whose words have two numbers each, one word.
template <DType kDType>
__device__ inline uint32_t of_two(uint32_t first, uint32_t second) {
  return larger<kDType>(pick_bytes(first, second, 0x5410), pick_bytes(first, second, 0x7632));
}

/// Of each of eight lines, rows or columns of a patch.
template <DType kDType>
struct LineMagnitudes {
  static constexpr int kInWord = kDType == DType::kF32 ? 1 : 2, kWords = 8 / kInWord;
  uint32_t words[kWords];  ///< of halves with any sign

  LineMagnitudes() = default;
  /// Of the columns of one row.
  __device__ explicit LineMagnitudes(const Chunk& row) {
    constexpr uint32_t kBits = kInWord == 1 ? formats::kMagnitudeBits : ~0u;
    for (int i = 0; i < kWords; ++i) words[i] = word(row, i) & kBits;
  }
  /// Of eight rows.
  __device__ explicit LineMagnitudes(const Chunk (&rows)[8]) {
    for (int i = 0; i < kWords; ++i) {
      const uint32_t first = LineMagnitudes(rows[kInWord * i]).folded();
      if constexpr (kInWord == 1) {
        words[i] = first;
      } else {
        words[i] = of_two<kDType>(first, LineMagnitudes(rows[2 * i + 1]).folded());
      }
    }
  }
  __device__ void add(const Chunk& row) {
    for (int i = 0; i < kWords; ++i) words[i] = larger<kDType>(words[i], word(row, i));
  }
  /// As bits of an fp32.
  __device__ uint32_t of_line(int k) const { return magnitude(words[k / kInWord], k % kInWord); }
  /// Of line `part * kLines + mine`; of these `mine`, less than kLines, is of the thread.
  template <int kLines>
  __device__ uint32_t of_mine(int part, int mine) const {
    static_assert(kLines % kInWord == 0);
    uint32_t found = 0;
    for (int k = part * kLines; k < (part + 1) * kLines; k += kInWord)
      if (k % kLines == mine / kInWord * kInWord) found = words[k / kInWord];
    return magnitude(found, mine % kInWord);
  }
  __device__ uint32_t of_all() const {
    const uint32_t all = folded();
    return max(magnitude(all, 0), magnitude(all, kInWord - 1));
  }

  __device__ static uint32_t magnitude(uint32_t word, int half) {
    if constexpr (kInWord == 1) return word;
    return formats::magnitude(pair_of(kDType, word >> (16 * half)).x);
  }
  /// The largest of all, or of the even ones and the odd ones, as a word has them.
  __device__ uint32_t folded() const {
    LineMagnitudes all = *this;
    for (int half = kWords / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i)
        all.words[i] = larger<kDType>(all.words[i], all.words[i + half]);
    return all.words[0];
  }
};

}  // namespace cadre::cuda
