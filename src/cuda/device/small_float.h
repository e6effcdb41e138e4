#pragma once
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "formats/small_float.h"

// Codes of 8 and 4 bits. Architectures from sm_89 on have instructions for those of 8 bits, which
// give the bits of src/formats.
namespace cadre::cuda {

/// The codes of two numbers, the first in the low half of sixteen bits.
template <class Element>
CADRE_HD inline uint32_t encode_pair(float first, float second) {
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

/// E2m1's code of a number, in about half the instructions. As a function of the magnitude, with
/// six and beyond as six, codes are the least of three lines, 2 x, x + 2 and x / 2 + 4, rounded to
/// nearest even; which adding 1.5 * 2^23 does.
CADRE_HD inline uint32_t encode_e2m1(float x) {
  constexpr float kInteger = 0x1.8p23f;
  const float m = fminf(fabsf(x), formats::E2m1::kLargest);  // six for a NaN
  const float low = formats::fma(m, 2.0f, kInteger), middle = formats::add(m, kInteger + 2);
  const float high = formats::fma(m, 0.5f, kInteger + 4);
  const uint32_t sign = formats::is_nan(x) ? 0 : formats::bits_of(x) >> 28 & 8;
  return (formats::bits_of(fminf(fminf(low, middle), high)) & 7) | sign;
}

/// Eight neighbouring codes of a line, the first in the lowest bits.
template <class Element>
struct EightCodes {
  static constexpr bool kNibbles = Element::kDType == DType::kE2m1;
  static constexpr int kBits = kNibbles ? 4 : 8;
  using Word = std::conditional_t<kNibbles, uint32_t, uint64_t>;

  Word word = 0;

  CADRE_HD static EightCodes of(const float (&x)[8]) {
    EightCodes codes;
    if constexpr (kNibbles) {
      for (int k = 0; k < 8; ++k) codes.put(k, encode_e2m1(x[k]));
    } else {
      uint32_t halves[2];
      for (int i = 0; i < 2; ++i)
        halves[i] = encode_pair<Element>(x[4 * i], x[4 * i + 1]) |
                    encode_pair<Element>(x[4 * i + 2], x[4 * i + 3]) << 16;
      codes.word = halves[0] | Word(halves[1]) << 32;
    }
    return codes;
  }
  CADRE_HD void put(int i, uint32_t code) { word |= Word(code) << (kBits * i); }
  CADRE_HD uint8_t get(int i) const {
    return uint8_t(uint32_t(word >> (kBits * i)) & ((1u << kBits) - 1));
  }
  /// Makes room at the end.
  CADRE_HD void push(uint8_t code) { word = word >> kBits | Word(code) << (7 * kBits); }
};

/// Turns eight lines: code k of line i becomes code i of line k. In squares of 8, 4 and 2 codes,
/// those above the diagonal change places with those below.
template <class Element>
__device__ inline void turn(EightCodes<Element> (&lines)[8]) {
  using Word = typename EightCodes<Element>::Word;
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
    const int bits = half * EightCodes<Element>::kBits;
    const Word first_halves = ~Word(0) / ((Word(1) << bits) + 1);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i & half) continue;
      Word &above = lines[i].word, &below = lines[i + half].word;
      const Word differ = (above >> bits ^ below) & first_halves;
      above ^= differ << bits, below ^= differ;
    }
  }
}

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

/// Reads the first `count` codes of a line, eight at most. The other half of a last byte comes
/// along as it is stored; what is left is zero.
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

/// A word as two halves.
CADRE_HD inline __half2 halves_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return reinterpret_cast<const __half2&>(bits);  // as it is, where parts are put together anew
#else
  __half2_raw raw;
  raw.x = uint16_t(bits), raw.y = uint16_t(bits >> 16);
  return __half2(raw);
#endif
}

/// The numbers of two codes, the first in the low half of sixteen bits. A half holds them all.
template <class Element>
CADRE_HD inline float2 decode_pair(uint32_t codes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t halves;
  if constexpr (Element::kDType == DType::kE4m3)
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(codes)));
  else
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(codes)));
  return __half22float2(halves_of(halves));
#else
  return {Element::decode(uint8_t(codes)), Element::decode(uint8_t(codes >> 8))};
#endif
}

/// The numbers of eight codes.
template <class Element>
CADRE_HD inline void decode_codes(const EightCodes<Element>& codes, float (&x)[8]) {
  if constexpr (EightCodes<Element>::kNibbles) {
    // Of codes k and k + 4, sign, exponent and mantissa go where halves have them, whose bias is
    // larger by 14.
    for (int k = 0; k < 4; ++k) {
      const uint32_t tops = codes.word << (12 - 4 * k);
      const uint32_t bits = (tops & 0x8000'8000u) | (tops >> 3 & 0x0e00'0e00u);
      const float2 pair = __half22float2(__hmul2(halves_of(bits), halves_of(0x7400'7400u)));
      x[k] = pair.x, x[k + 4] = pair.y;
    }
  } else {
    for (int k = 0; k < 8; k += 2) {
      const float2 pair = decode_pair<Element>(uint32_t(codes.word >> (8 * k)) & 0xffff);
      x[k] = pair.x, x[k + 1] = pair.y;
    }
  }
}

}  // namespace cadre::cuda
