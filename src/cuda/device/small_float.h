#pragma once
#include <cstdint>

#include "formats/small_float.h"

// Codes of 8 and 4 bits. Architectures from sm_89 on have instructions for those of 8 bits, which
// give the bits of src/formats.
namespace cadre::cuda {

/// The codes of two numbers, the first in the low half of sixteen bits.
template <class Element>
__device__ inline uint32_t encode_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t both;
  if constexpr (Element::kDType == DType::kE4m3)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
  else
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
  return both;
#else
  return Element::encode_word(first) | Element::encode_word(second) << 8;
#endif
}

/// Eight neighbouring codes of a line, the first in the lowest bits.
template <class Element>
struct EightCodes {
  static constexpr bool kNibbles = Element::kDType == DType::kE2m1;
  static constexpr int kBits = kNibbles ? 4 : 8;
  using Word = std::conditional_t<kNibbles, uint32_t, uint64_t>;

  Word word = 0;

  __device__ static EightCodes of(const float (&x)[8]) {
    EightCodes codes;
    if constexpr (kNibbles)
      for (int k = 0; k < 8; ++k) codes.put(k, Element::encode_word(x[k]));
    else
      for (int k = 0; k < 8; k += 2)
        codes.word |= Word(encode_pair<Element>(x[k], x[k + 1])) << (8 * k);
    return codes;
  }
  __device__ void put(int i, uint32_t code) { word |= Word(code) << (kBits * i); }
  __device__ uint8_t get(int i) const {
    return uint8_t(uint32_t(word >> (kBits * i)) & ((1u << kBits) - 1));
  }
  /// Makes room at the end.
  __device__ void push(uint8_t code) { word = word >> kBits | Word(code) << (7 * kBits); }
};

/// Writes the first `count` codes of a line, eight at most; the other half of a last byte is zero.
template <class Element>
__device__ inline void store_codes(uint8_t* to, EightCodes<Element> codes, int count) {
  using Word = typename EightCodes<Element>::Word;
  constexpr int kInByte = 8 / EightCodes<Element>::kBits;
  if (count >= 8 && reinterpret_cast<uintptr_t>(to) % sizeof(Word) == 0) {
    *reinterpret_cast<Word*>(to) = codes.word;
    return;
  }
#pragma unroll 1
  for (int left = min(count, 8); left > 0; left -= kInByte, codes.word >>= 8)
    *to++ = uint8_t(codes.word & (left < kInByte ? 0xf : 0xff));
}

/// Reads the first `count` codes of a line, eight at most; the others are zero.
template <class Element>
__device__ inline EightCodes<Element> load_codes(const uint8_t* from, int count) {
  using Word = typename EightCodes<Element>::Word;
  constexpr int kInByte = 8 / EightCodes<Element>::kBits;
  if (count >= 8 && reinterpret_cast<uintptr_t>(from) % sizeof(Word) == 0)
    return {*reinterpret_cast<const Word*>(from)};
  EightCodes<Element> codes;
#pragma unroll 1
  for (int i = 0; i < min(count, 8); i += kInByte)
    codes.word |= Word(*from++) << (EightCodes<Element>::kBits * i);
  return codes;
}

}  // namespace cadre::cuda
