#pragma once
// A binary float by its definition, in double and by search: slow, and shares nothing with
// src/formats.
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <vector>

namespace cadre::test {

struct FloatDefinition {
  int exponent_bits, mantissa_bits;
  uint32_t largest;  ///< code of the largest finite value
  bool overflows;    ///< to infinity, at half a step beyond the largest; else it saturates
};

inline constexpr FloatDefinition kE4m3Definition{4, 3, 0x7e, false};
inline constexpr FloatDefinition kE5m2Definition{5, 2, 0x7b, false};
inline constexpr FloatDefinition kE2m1Definition{2, 1, 0x7, false};
inline constexpr FloatDefinition kBf16Definition{8, 7, 0x7f7f, true};
inline constexpr FloatDefinition kFp16Definition{5, 10, 0x7bff, true};

/// The value of a code without sign. Beyond the largest it goes on as if the exponent did.
inline double value_of(const FloatDefinition& f, uint32_t code) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const int exponent = int(code >> f.mantissa_bits);
  const int mantissa = int(code & ((1u << f.mantissa_bits) - 1));
  const int leading = exponent ? 1 << f.mantissa_bits : 0;
  return std::ldexp(leading + mantissa, (exponent ? exponent : 1) - bias - f.mantissa_bits);
}

/// The code nearest to |x|, of two the even one, by bisection over all values; x is not NaN.
inline uint32_t nearest_code(const FloatDefinition& f, double x) {
  const double m = std::abs(x);
  const uint32_t last = f.overflows ? f.largest + 1 : f.largest;
  if (m >= value_of(f, last)) return last;
  uint32_t low = 0, high = last;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (value_of(f, middle) <= m ? low : high) = middle;
  }
  const double down = m - value_of(f, low), up = value_of(f, high) - m;
  return down < up ? low : down > up ? high : low % 2 ? high : low;
}

/// The nearest code with the sign of x on top.
inline uint32_t signed_code(const FloatDefinition& f, double x) {
  return nearest_code(f, x) | (std::signbit(x) ? 1u << (f.exponent_bits + f.mantissa_bits) : 0u);
}

/// Calls `see` with every value of the format and every midpoint of two neighbours, the midpoint
/// beyond the largest too, each with the floats next to it and with both signs.
inline void for_values_and_midpoints(const FloatDefinition& f,
                                     const std::function<void(float)>& see) {
  const float inf = std::numeric_limits<float>::infinity();
  for (uint32_t code = 0; code <= f.largest; ++code) {
    const double value = value_of(f, code), middle = (value + value_of(f, code + 1)) / 2;
    for (const float exact : {float(value), float(middle)})
      for (const float x : {std::nextafter(exact, -inf), exact, std::nextafter(exact, inf)}) {
        see(x);
        see(-x);
      }
  }
}

/// Calls `see` with zeros, infinities, the ends of fp32, and floats with uniformly random bits.
inline void for_extremes_and_random(int count, const std::function<void(float)>& see) {
  using Limits = std::numeric_limits<float>;
  for (const float x :
       {0.0f, Limits::denorm_min(), Limits::min(), Limits::max(), Limits::infinity()}) {
    see(x);
    see(-x);
  }
  std::mt19937 random(20240);
  for (int i = 0; i < count; ++i) {
    const float x = std::bit_cast<float>(uint32_t(random()));
    if (!std::isnan(x)) see(x);
  }
}

/// NaNs with both signs, quiet and signalling, with small and large payloads.
inline std::vector<float> all_kinds_of_nan() {
  std::vector<float> nans;
  for (const uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffc12345u})
    nans.push_back(std::bit_cast<float>(bits));
  return nans;
}

}  // namespace cadre::test
