#pragma once
#include "cuda/device/magnitude.h"
#include "cuda/device/small_float.h"

// Codes of e2m1 of eight bf16 numbers in four words, each times a multiplier, where all products
// are numbers below seven: limited_halves() sees to that. Rounded to nearest, or by random bits as
// RandomE2m1Codes does.
namespace cadre::cuda {

/// The smaller magnitude of each of two pairs of bf16, with the sign of the first; of a NaN and a
/// number the number.
__device__ inline uint32_t limited_halves(uint32_t pair, uint32_t limits) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  uint32_t both;
  asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(pair), "r"(limits));
  return both;
#else
  const auto half = [&](int shift) {
    const uint32_t x = pair >> shift & 0xffff, limit = limits >> shift & 0x7fff;
    return ((x & 0x7fff) > limit ? (x & 0x8000) | limit : x) << shift;
  };
  return half(0) | half(16);
#endif
}

/// A bf16 number of which the product is from six up to 6.5, for a positive multiplier.
__device__ inline uint32_t limit_of(float multiplier) {
  return (0x8044'ccceu - __float_as_uint(multiplier)) >> 16;
}

/// As E2m1Codes, for magnitudes below seven.
struct NearestCode {
  /// In the last bits; sums of such numbers have bits above them that are of no use.
  CADRE_HD static uint32_t of(float m) {
    constexpr float kOfFour = 0x1p23f;
    const uint32_t first = formats::bits_of(formats::add(m, kOfFour - 2)),
                   last = formats::bits_of(formats::fma(m, 0.5f, kOfFour + 4));
    return uint32_t(__viaddmin_s32(int(first), 4, int(last)));
  }
};

/// Random codes of magnitudes below seven. A float so small that one is its least normal number has
/// its code in the bits from 22 on, since e2m1 has subnormal numbers as floats have them; what lies
/// below is the fraction. Rounding up loses nothing of it that a threshold could tell.
struct RandomCode {
  /// In the last byte; eight where it should be seven.
  CADRE_HD static uint32_t of(float magnitude, RandomHalf random) {
    // The threshold, (random + 1/2) / 2^16, less one and the last bit: a fraction of 24 bits.
    const uint32_t less = pick_bytes(random.word, random.rest, random.upper ? 0x5324 : 0x5104);
    return in_small_bits(magnitude) * 4 - less;
  }

 private:
  CADRE_HD static uint32_t in_small_bits(float magnitude) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(__fmul_ru(magnitude, 0x1p-126f));
#else
    return magnitude < 1 ? uint32_t(ceilf(magnitude * 0x1p23f))
                         : formats::bits_of(magnitude) - (126u << 23);
#endif
  }
};

/// Codes that have no signs, with those of four pairs of bf16.
CADRE_HD inline uint32_t with_signs(uint32_t codes, const uint32_t (&pairs)[4]) {
  const uint32_t first = pick_bytes(pairs[0], pairs[1], 0x7351),
                 last = pick_bytes(pairs[2], pairs[3], 0x7351);
  return codes | (pick_bytes(first, last, 0xdc98) & 0x0808'0808u) |
         (pick_bytes(first, last, 0x7632) & 0x8080'8080u);
}
/// The codes of four pairs times two multipliers, those of a pair in a byte.
__device__ inline uint32_t nearest_codes(const uint32_t (&pairs)[4], float2 by) {
  uint32_t bytes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = pair_of(DType::kBf16, pairs[i]);
    bytes[i] = NearestCode::of(formats::mul(fabsf(x.x), by.x)) +
               NearestCode::of(formats::mul(fabsf(x.y), by.y)) * 16;
  }
  const uint32_t codes = pick_bytes(pick_bytes(bytes[0], bytes[1], 0x0040),
                                    pick_bytes(bytes[2], bytes[3], 0x0040), 0x5410);
  return with_signs(codes, pairs);
}
/// The same where random(k) is what number k is rounded by.
__device__ inline uint32_t random_codes(const uint32_t (&pairs)[4], float2 by, auto&& random) {
  uint32_t codes[4][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = pair_of(DType::kBf16, pairs[i]);
    codes[i][0] = RandomCode::of(formats::mul(fabsf(x.x), by.x), random(2 * i));
    codes[i][1] = RandomCode::of(formats::mul(fabsf(x.y), by.y), random(2 * i + 1));
  }
  const auto together = [&](int k) {
    return pick_bytes(pick_bytes(codes[0][k], codes[1][k], 0x0073),
                      pick_bytes(codes[2][k], codes[3][k], 0x0073), 0x5410);
  };
  const uint32_t all = together(0) + together(1) * 16;
  return with_signs(all - (all >> 3 & 0x1111'1111u), pairs);
}

/// The numbers of eight codes, two in a word, times factors, whose products are bf16 numbers. The
/// two bytes of each are looked up by its code.
__device__ inline uint4 e2m1_numbers(uint32_t codes, const uint32_t (&factors)[4]) {
  const uint32_t even_signs = codes << 4;
  const auto word = [&](int i) {
    const uint32_t of_four = (codes & 0x7777'7777u) >> (i / 2 * 16);
    const uint32_t low = pick_bytes(0xc080'0000u, 0xc080'4000u, of_four);
    const uint32_t signs = pick_bytes(codes, even_signs, i < 2 ? 0x1504 : 0x3726);
    const uint32_t high = pick_bytes(0x3f3f'3f00u, 0x4040'4040u, of_four) | (signs & 0x8080'8080u);
    return pair_product(pick_bytes(low, high, i % 2 == 0 ? 0x5140 : 0x7362), factors[i]);
  };
  return {word(0), word(1), word(2), word(3)};
}

}  // namespace cadre::cuda
