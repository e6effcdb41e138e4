// Quotients by one divisor have the bits of divisions.
#include "formats/divisor.h"

#include <gtest/gtest.h>

#include <bit>
#include <random>

using namespace cadre::formats;

namespace {

/// A number of this exponent and mantissa.
float number(int exponent, uint32_t mantissa) {
  return float_of(uint32_t(127 + exponent) << 23 | (mantissa & kMantissaBits));
}

TEST(Divisor, HasTheBitsOfDivisions) {
  std::mt19937 random(1);
  for (int i = 0; i < 40'000; ++i) {
    const float b = number(i % 16, uint32_t(random()));
    const Divisor divisor(b);
    for (int j = 0; j < 50; ++j) {
      const float a = number(-1 - int(random() % 90), uint32_t(random()));
      ASSERT_EQ(divisor.quotient(a), a / b) << a << " / " << b;
    }
    ASSERT_EQ(divisor.quotient(0), 0);
    ASSERT_EQ(divisor.quotient(1), 1 / b);
  }
}

/// The least and the greatest mantissas, whose quotients are next to numbers and to midpoints.
TEST(Divisor, OfExtremeMantissas) {
  for (uint32_t i = 0; i < 1000; ++i)
    for (uint32_t j = 0; j < 1000; ++j)
      for (uint32_t from : {0u, kMantissaBits - 999}) {
        const float b = number(int(i % 16), from + i);
        ASSERT_EQ(Divisor(b).quotient(number(-90, j)), number(-90, j) / b);
        ASSERT_EQ(Divisor(b).quotient(number(-1, kMantissaBits - j)),
                  number(-1, kMantissaBits - j) / b);
      }
}

/// Calls try_dividend(a) with each a of a 2^bits = b m + rest for a number m of 25 bits: where m is
/// odd, a / b is next to a midpoint of two numbers of 24 bits.
template <class Try>
void for_dividends_near_midpoints(uint64_t b, int bits, int64_t rest, Try&& try_dividend) {
  const int twos = std::countr_zero(b);
  if (rest % (int64_t(1) << twos) != 0) return;
  const uint64_t odd = b >> twos, step = uint64_t(1) << (bits - twos);
  uint64_t inverse = 1;
  for (int i = 0; i < 6; ++i) inverse *= 2 - odd * inverse;
  const uint64_t least = (0 - uint64_t(rest >> twos)) * inverse & (step - 1);
  for (uint64_t m = least; m < 1u << 25; m += step) {
    const uint64_t a = (b * m + uint64_t(rest)) >> bits;
    if (m >= 1u << 24 && a >= 1u << 23 && a < 1u << 24) try_dividend(a);
  }
}

/// The only quotients that may be rounded to the wrong side.
TEST(Divisor, OfQuotientsNextToMidpoints) {
  int64_t tried = 0, wrong = 0;
  for (uint64_t b = 1u << 23; b < 1u << 24; b += 29) {
    const float denominator = float(b) * 0x1p-23f;
    const Divisor divisor(denominator);
    for (int64_t rest = -12; rest <= 12; ++rest)
      for (int bits : {24, 25})
        for_dividends_near_midpoints(b, bits, rest, [&](uint64_t a) {
          const float numerator = float(a) * 0x1p-40f;
          wrong += divisor.quotient(numerator) != numerator / denominator;
          ++tried;
        });
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(tried, 3'000'000);
}

}  // namespace
