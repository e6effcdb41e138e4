// e8m0: every code, and the two rounding rules at every boundary of exponent and mantissa.
#include "formats/e8m0.h"

#include <gtest/gtest.h>

#include <random>

#include "definition.h"
#include "formats/small_float.h"

using namespace cadre;
using namespace cadre::formats;
using namespace cadre::test;

namespace {

/// The smallest code whose power of two is not below v; 254 where there is none.
int want_up(double v) {
  for (int code = 0; code < 254; ++code)
    if (std::ldexp(1.0, code - 127) >= v) return code;
  return 254;
}

/// floor(log2(amax)) - largest_exponent, moved into the codes.
int want_floor(double amax, int largest_exponent) {
  if (amax == 0) return 0;
  return std::max(0, std::min(std::ilogb(amax) - largest_exponent + 127, 254));
}

TEST(E8m0, DecodesEveryCodeAndItsReciprocal) {
  for (int code = 0; code < 255; ++code) {
    EXPECT_EQ(E8m0::decode(uint8_t(code)), std::ldexp(1.0, code - 127)) << code;
    EXPECT_EQ(E8m0::reciprocal(uint8_t(code)), std::ldexp(1.0, 127 - code)) << code;
  }
  EXPECT_TRUE(std::isnan(E8m0::decode(255)));
  EXPECT_TRUE(std::isnan(E8m0::reciprocal(255)));
}

TEST(E8m0, RoundsUpAtEveryBoundary) {
  const uint32_t mantissas[] = {0, 1, 2, 0x3fffff, 0x400000, 0x400001, 0x7ffffe, 0x7fffff};
  for (uint32_t exponent = 0; exponent < 255; ++exponent)
    for (const uint32_t mantissa : mantissas) {
      const float v = float_of(exponent << 23 | mantissa);
      ASSERT_EQ(E8m0::encode_up(v), want_up(v)) << std::hexfloat << v;
    }
}

TEST(E8m0, RoundsSubnormalsUpToTheirOwnPowerOrTheNext) {
  EXPECT_EQ(E8m0::encode_up(float_of(0x400000)), 0);  // 2^-127 itself
  EXPECT_EQ(E8m0::encode_up(float_of(0x400001)), 1);
  EXPECT_EQ(E8m0::encode_up(float_of(0x000001)), 0);
  EXPECT_EQ(E8m0::encode_up(float_of(0x7fffff)), 1);
  EXPECT_EQ(E8m0::encode_up(0), 0);
}

TEST(E8m0, SaturatesInfinityAndKeepsNan) {
  EXPECT_EQ(E8m0::encode_up(INFINITY), 254);
  EXPECT_EQ(E8m0::encode_up(kLargestFloat), 254);
  EXPECT_EQ(E8m0::encode_floor(INFINITY, 8), 254);
  for (const float nan : all_kinds_of_nan()) {
    EXPECT_EQ(E8m0::encode_up(nan), 255);
    EXPECT_EQ(E8m0::encode_floor(nan, 8), 255);
  }
}

TEST(E8m0, RoundsDownByTheOcpRule) {
  for (const int largest_exponent : {2, 8, 15})
    for (uint32_t exponent = 0; exponent < 255; ++exponent)
      for (const uint32_t mantissa : {0u, 1u, 0x400000u, 0x7fffffu}) {
        const float amax = float_of(exponent << 23 | mantissa);
        ASSERT_EQ(E8m0::encode_floor(amax, largest_exponent), want_floor(amax, largest_exponent))
            << std::hexfloat << amax;
      }
}

TEST(E8m0, RandomValuesRoundAsBySearch) {
  std::mt19937 random(11);
  for (int i = 0; i < 100'000; ++i) {
    const float v = float_of(uint32_t(random()) & kMagnitudeBits);
    if (!is_finite(v)) continue;
    ASSERT_EQ(E8m0::encode_up(v), want_up(v)) << std::hexfloat << v;
    ASSERT_EQ(E8m0::encode_floor(v, 8), want_floor(v, 8)) << std::hexfloat << v;
  }
}

template <class Element>
void expect_scales_cover(int largest_exponent) {
  EXPECT_EQ(exponent_of(Element::kLargest), largest_exponent);
  std::mt19937 random(12);
  for (int i = 0; i < 20'000; ++i) {
    const float amax = float_of(uint32_t(random()) & kMagnitudeBits);
    if (!is_finite(amax)) continue;
    const double up = E8m0::decode(e8m0_scale<Element>(amax, false));
    EXPECT_LE(amax, up * Element::kLargest * (1 + 1e-7)) << "an element would saturate";
    if (up > pow2(-127)) {
      EXPECT_GT(amax * (1 + 1e-7), up / 2 * Element::kLargest) << "half would do";
    }
    EXPECT_EQ(e8m0_scale<Element>(amax, true), want_floor(amax, largest_exponent));
  }
}

TEST(E8m0, ScalesAreTheSmallestThatCoverABlock) {
  expect_scales_cover<E4m3>(8);
  expect_scales_cover<E5m2>(15);
  expect_scales_cover<E2m1>(2);
}

static_assert(E8m0::encode_up(1.0f) == 127 && E8m0::encode_up(1.5f) == 128);
static_assert(E8m0::decode(0) == pow2(-127) && e8m0_scale<E4m3>(448.0f, false) == 127);

}  // namespace
