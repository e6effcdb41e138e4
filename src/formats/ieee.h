#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cadre/host_device.h"

namespace cadre::formats {

inline constexpr uint32_t kMagnitudeBits = 0x7fff'ffffu;  ///< all of an fp32 but its sign
inline constexpr uint32_t kInfinityBits = 0x7f80'0000u;
inline constexpr uint32_t kMantissaBits = 0x007f'ffffu;
inline constexpr uint32_t kNanBits = 0x7fff'ffffu;  ///< what NVIDIA's conversions give for any NaN
inline constexpr float kLargestFloat = std::bit_cast<float>(0x7f7f'ffffu);
inline constexpr float kNan = std::bit_cast<float>(kNanBits);

CADRE_HD constexpr uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }
CADRE_HD constexpr float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

/// |x| as bits: orders like the magnitudes themselves, infinity above all numbers and NaN above
/// infinity. A maximum over these is exact, in any order, and does not lose a NaN.
CADRE_HD constexpr uint32_t magnitude(float x) { return bits_of(x) & kMagnitudeBits; }

CADRE_HD constexpr bool is_nan(float x) { return magnitude(x) > kInfinityBits; }
CADRE_HD constexpr bool is_finite(float x) { return magnitude(x) < kInfinityBits; }

/// 2^exponent, for -149 <= exponent <= 127.
CADRE_HD constexpr float pow2(int exponent) {
  return exponent >= -126 ? float_of(uint32_t(exponent + 127) << 23)
                          : float_of(1u << (exponent + 149));
}

// Add, multiply, both at once, and divide, each rounded once to nearest even, subnormals kept.
// Device code names the instruction, since nvcc would otherwise fuse a multiplication into an
// addition where the source does not, and the bits would differ from the CPU's; the host is built
// with -ffp-contract=off. This is the only place in the formats that asks for whom it is compiled.

CADRE_HD constexpr float add(float a, float b) {
#ifdef __CUDA_ARCH__
  if (!std::is_constant_evaluated()) return __fadd_rn(a, b);
#endif
  return a + b;
}

CADRE_HD constexpr float mul(float a, float b) {
#ifdef __CUDA_ARCH__
  if (!std::is_constant_evaluated()) return __fmul_rn(a, b);
#endif
  return a * b;
}

/// a * b + c.
CADRE_HD constexpr float fma(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  if (!std::is_constant_evaluated()) return __fmaf_rn(a, b, c);
#endif
  return std::fma(a, b, c);
}
CADRE_HD constexpr double fma(double a, double b, double c) { return std::fma(a, b, c); }

CADRE_HD constexpr float div(float a, float b) {
#ifdef __CUDA_ARCH__
  if (!std::is_constant_evaluated()) return __fdiv_rn(a, b);
#endif
  return a / b;
}

/// 1 / x, rounded once, for 2^-125 <= x <= 2^125 and NaN. A division of the device would branch for
/// others; here one step of Newton's from an approximation within one unit in the last place does.
CADRE_HD constexpr float reciprocal(float x) {
#ifdef __CUDA_ARCH__
  if (!std::is_constant_evaluated()) {
    float near = 0;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
    return __fmaf_rn(near, __fmaf_rn(-x, near, 1.0f), near);
  }
#endif
  return 1.0f / x;
}
CADRE_HD constexpr double reciprocal(double x) { return 1.0 / x; }

/// The lesser of x and a bound that is no NaN, or the larger one; NaN stays NaN. One instruction,
/// where the compiler, which does not know the bound, takes two.
CADRE_HD constexpr float at_most(float x, float bound) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if (!std::is_constant_evaluated()) {
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(bound));
    return x;
  }
#endif
  return x > bound ? bound : x;
}
CADRE_HD constexpr float at_least(float x, float bound) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if (!std::is_constant_evaluated()) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(bound));
    return x;
  }
#endif
  return x < bound ? bound : x;
}
CADRE_HD constexpr double at_most(double x, double bound) { return x > bound ? bound : x; }
CADRE_HD constexpr double at_least(double x, double bound) { return x < bound ? bound : x; }

/// All 64 bits of a product, which the device has in one instruction; in plain C++ nvcc may take
/// what becomes of it for a number of 64 bits too, and its product for one of such numbers.
CADRE_HD constexpr uint64_t wide_product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  if (!std::is_constant_evaluated()) {
    uint64_t product = 0;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
  }
#endif
  return uint64_t(a) * b;
}

/// A double rounded to odd: toward zero, with the last bit set if that lost anything. Rounding the
/// result once more, to at most 22 bits, gives what one rounding of the double would have given.
CADRE_HD constexpr float round_to_odd(double x) {
  const float nearest = float(x);
  if (double(nearest) == x || x != x) return nearest;
  const double distance = x < 0 ? -x : x,
               rounded = nearest < 0 ? -double(nearest) : double(nearest);
  return float_of((bits_of(nearest) - (rounded > distance ? 1u : 0u)) | 1u);
}

}  // namespace cadre::formats
