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

/// The codes of four numbers, the first in the lowest bits.
template <class Element>
CADRE_HD inline uint32_t encode_four(float first, float second, float third, float fourth) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  // Put together within, the second pair's instruction takes the first pair along.
  uint32_t all;
  if constexpr (Element::kDType == DType::kE4m3)
    asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;"
        " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high};}"
        : "=r"(all)
        : "f"(first), "f"(second), "f"(third), "f"(fourth));
  else
    asm("{.reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;"
        " cvt.rn.satfinite.e5m2x2.f32 high, %4, %3; mov.b32 %0, {low, high};}"
        : "=r"(all)
        : "f"(first), "f"(second), "f"(third), "f"(fourth));
  return all;
#else
  return encode_pair<Element>(first, second) | encode_pair<Element>(third, fourth) << 16;
#endif
}

/// Sixteen random bits: a half of a word, the lower or the upper one. rest: the bytes that stand
/// around them in RandomCode; from a register of the thread where many draws share it.
struct RandomHalf {
  static constexpr uint32_t kRest = 0xff81u;

  uint32_t word;
  int upper;
  uint32_t rest = kRest;
};

/// Bytes of two words, of which a nibble of the selector names each, the second's from four on;
/// with eight more, the highest bit of that byte, eight times.
CADRE_HD inline uint32_t pick_bytes(uint32_t first, uint32_t second, uint32_t selector) {
#ifdef __CUDA_ARCH__
  uint32_t picked;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(first), "r"(second), "r"(selector));
  return picked;
#else
  const uint64_t bytes = first | uint64_t(second) << 32;
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t which = selector >> 4 * i, byte = uint32_t(bytes >> 8 * (which & 7) & 0xff);
    picked |= (which & 8 ? (byte >> 7) * 0xff : byte) << 8 * i;
  }
  return picked;
#endif
}

/// (word & mask) ^ flips, in one instruction.
CADRE_HD inline uint32_t and_xor(uint32_t word, uint32_t mask, uint32_t flips) {
#ifdef __CUDA_ARCH__
  asm("lop3.b32 %0, %0, %1, %2, 0x6a;" : "+r"(word) : "r"(mask), "r"(flips));
  return word;
#else
  return (word & mask) ^ flips;
#endif
}

/// a * b + c rounded up, for an exact a * b.
CADRE_HD inline float fma_up(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_ru(a, b, c);
#else
  const float product = a * b, sum = product + c, added = sum - product;
  const float lost = (product - (sum - added)) + (c - added);
  return lost > 0 ? nextafterf(sum, INFINITY) : sum;
#endif
}

/// The least of three numbers, of which the last two are positive.
CADRE_HD inline float least(float a, float b, float c) {
  using formats::bits_of;
  return formats::float_of(
      uint32_t(__vimin3_s32(int(bits_of(a)), int(bits_of(b)), int(bits_of(c)))));
}

/// E2m1's codes of numbers that are products, so that a GPU's NaN has no sign. As a function of the
/// magnitude, with six and beyond as six, codes are the least of three lines, 2 x, x + 2 and
/// x / 2 + 4, rounded. Words of codes are sums in which each has a constant beside it, and the sum
/// of the constants is subtracted at the end.
struct E2m1Codes {
  CADRE_HD static float magnitude(float x) { return fminf(fabsf(x), formats::E2m1::kLargest); }
  CADRE_HD static float of_product(float x) {
#ifndef __CUDA_ARCH__
    if (formats::is_nan(x)) return formats::kNan;
#endif
    return x;
  }

  /// Rounded to nearest even. The first two lines are one sum: floats have steps of a half below
  /// 2^23, where x is two, and of one above. Its last bits are those of that number, less four, and
  /// the code.
  CADRE_HD static uint32_t nearest(const float (&x)[8]) {
    constexpr float kOfFour = 0x1p23f;
    uint32_t sum = 0;
    for (int k = 7; k >= 0; --k) {
      const float m = magnitude(x[k]);
      const float code = fminf(formats::add(m, kOfFour - 2), formats::fma(m, 0.5f, kOfFour));
      sum = sum * 16 + formats::bits_of(code);
    }
    return with_signs(sum - (formats::bits_of(kOfFour) - 4) * 0x1111'1111u, x);
  }

 private:
  /// Codes that have none, with those of the numbers.
  CADRE_HD static uint32_t with_signs(uint32_t codes, const float (&x)[8]) {
    uint32_t tops[8];
    for (int k = 0; k < 8; ++k) tops[k] = formats::bits_of(of_product(x[k]));
    const auto of_four = [&](int k) {
      return pick_bytes(pick_bytes(tops[k], tops[k + 2], 0xfb),
                        pick_bytes(tops[k + 4], tops[k + 6], 0xfb), 0x5410);
    };
    return codes | (of_four(0) & 0x0808'0808u) | (of_four(1) & 0x8080'8080u);
  }
};

/// Eight codes of e2m1, rounded away from zero if the fraction is more than (random + 1/2) / 2^16.
/// All sums are rounded up, which the last one does to a whole number of 2^-16: the fraction, less
/// 2^-17 and random / 2^16, is then above zero or not. That sum is 192 less, so that its upper half
/// is what -192 has there, less the code; of a negative number, less eight more.
class RandomE2m1Codes {
 public:
  /// Codes k and k + 4, first those of k = 3 and last of 0.
  CADRE_HD void add(float x, RandomHalf random, float fourth_next, RandomHalf of_it) {
    sum_ = sum_ * 16 + pick_bytes(difference(x, random), difference(fourth_next, of_it), 0x7632);
  }
  CADRE_HD uint32_t word() const { return 0xc340'c340u * 0x1111u - sum_; }

 private:
  CADRE_HD static uint32_t difference(float product, RandomHalf random) {
    constexpr float kHalf = 0x1p-17f;
    const float x = E2m1Codes::of_product(product), m = E2m1Codes::magnitude(x);
    const float code =
        least(fma_up(m, 2.0f, -kHalf), fma_up(m, 1.0f, 2 - kHalf), fma_up(m, 0.5f, 4 - kHalf));
    // 192 and the random bits behind it; of a negative number 184.
    const uint32_t bits =
        pick_bytes(random.word, formats::bits_of(x), random.upper ? 0xff32 : 0xff10);
    const float subtrahend = formats::float_of(and_xor(bits, 0x0078'ffffu, 0x4340'0000u));
    return formats::bits_of(fma_up(code, 1.0f, -subtrahend));
  }

  uint32_t sum_ = 0;
};

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
      codes.word = E2m1Codes::nearest(x);
    } else {
      uint32_t halves[2];
      for (int i = 0; i < 2; ++i)
        halves[i] = encode_four<Element>(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
      codes.word = halves[0] | Word(halves[1]) << 32;
    }
    return codes;
  }
  CADRE_HD static EightCodes of(const float (&x)[8], const RandomHalf (&random)[8]) {
    static_assert(kNibbles);
    RandomE2m1Codes codes;
    for (int k = 3; k >= 0; --k) codes.add(x[k], random[k], x[k + 4], random[k + 4]);
    return {codes.word()};
  }
  CADRE_HD uint8_t get(int i) const {
    return uint8_t(uint32_t(word >> (kBits * i)) & ((1u << kBits) - 1));
  }
  /// Makes room at the end.
  CADRE_HD void push(uint8_t code) { word = word >> kBits | Word(code) << (7 * kBits); }
};

/// Turns four lines of four bytes: byte k of line i becomes byte i of line k.
CADRE_HD inline void turn_bytes(uint32_t (&lines)[4]) {
  const uint32_t first[2] = {pick_bytes(lines[0], lines[1], 0x5140),
                             pick_bytes(lines[2], lines[3], 0x5140)};
  const uint32_t last[2] = {pick_bytes(lines[0], lines[1], 0x7362),
                            pick_bytes(lines[2], lines[3], 0x7362)};
  lines[0] = pick_bytes(first[0], first[1], 0x5410);
  lines[1] = pick_bytes(first[0], first[1], 0x7632);
  lines[2] = pick_bytes(last[0], last[1], 0x5410);
  lines[3] = pick_bytes(last[0], last[1], 0x7632);
}

/// Turns eight lines: code k of line i becomes code i of line k.
template <class Element>
__device__ inline void turn(EightCodes<Element> (&lines)[8]) {
  if constexpr (EightCodes<Element>::kNibbles) {
    // In squares of 8, 4 and 2 codes, those above the diagonal change places with those below.
#pragma unroll
    for (int half = 4; half > 0; half /= 2) {
      const uint32_t first_halves = ~0u / ((1u << 4 * half) + 1);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i & half) continue;
        uint32_t &above = lines[i].word, &below = lines[i + half].word;
        const uint32_t differ = (above >> 4 * half ^ below) & first_halves;
        above ^= differ << 4 * half, below ^= differ;
      }
    }
  } else {
    uint32_t quarters[2][2][4];  // of codes and of lines from four on, or not
#pragma unroll
    for (int i = 0; i < 16; ++i)
      quarters[i % 2][i / 8][i / 2 % 4] = uint32_t(lines[i / 2].word >> 32 * (i % 2));
#pragma unroll
    for (int i = 0; i < 4; ++i) turn_bytes(quarters[i / 2][i % 2]);
#pragma unroll
    for (int k = 0; k < 8; ++k)
      lines[k].word = quarters[k / 4][0][k % 4] | uint64_t(quarters[k / 4][1][k % 4]) << 32;
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
