// bf16 and fp16: every code, every midpoint, the ends, and the single rounding of doubles.
#include <gtest/gtest.h>

#include "definition.h"
#include "formats/bf16.h"
#include "formats/fp16.h"
#include "formats/fp32.h"

using namespace cadre;
using namespace cadre::formats;
using namespace cadre::test;

namespace {

template <class Float>
struct Case;
template <>
struct Case<Bf16> {
  static constexpr FloatDefinition kDefinition = kBf16Definition;
};
template <>
struct Case<Fp16> {
  static constexpr FloatDefinition kDefinition = kFp16Definition;
};

template <class Float>
struct PlainFloat : testing::Test {
  static constexpr FloatDefinition kDefinition = Case<Float>::kDefinition;
  static void expect_nearest(float x) {
    ASSERT_EQ(Float::encode(x), signed_code(kDefinition, x)) << std::hexfloat << x;
    ASSERT_EQ(Float::encode(double(x)), signed_code(kDefinition, x)) << std::hexfloat << x;
  }
};
using Floats = testing::Types<Bf16, Fp16>;
TYPED_TEST_SUITE(PlainFloat, Floats);

TYPED_TEST(PlainFloat, DecodesEveryFiniteCodeAndEncodesItBack) {
  for (uint32_t code = 0; code <= this->kDefinition.largest; ++code)
    for (const uint32_t sign : {0u, 0x8000u}) {
      const float value = TypeParam::decode(uint16_t(code | sign));
      ASSERT_EQ(value, (sign ? -1 : 1) * value_of(this->kDefinition, code)) << code;
      ASSERT_EQ(std::signbit(value), sign != 0);
      ASSERT_EQ(TypeParam::encode(value), code | sign);
    }
}

TYPED_TEST(PlainFloat, RoundsToTheNearestCodeAtEveryValueAndMidpoint) {
  for_values_and_midpoints(this->kDefinition, this->expect_nearest);
  for_extremes_and_random(200'000, this->expect_nearest);
}

TYPED_TEST(PlainFloat, RoundsDoublesOnce) {
  // A hair beside a midpoint: rounding to fp32 first would land on the midpoint and lose the hair.
  for (uint32_t code = 0; code <= this->kDefinition.largest; ++code) {
    const double middle =
        (value_of(this->kDefinition, code) + value_of(this->kDefinition, code + 1)) / 2;
    for (const double x : {std::nextafter(middle, 0.0), middle, std::nextafter(middle, 1e300)})
      for (const double y : {x, -x})
        ASSERT_EQ(TypeParam::encode(y), signed_code(this->kDefinition, y)) << std::hexfloat << y;
  }
  for (const double x : {1e300, -1e300, 1e-300, -1e-300, 5e-324})
    EXPECT_EQ(TypeParam::encode(x), signed_code(this->kDefinition, x)) << x;
}

TYPED_TEST(PlainFloat, TurnsEveryNanIntoOneAndKeepsInfinities) {
  for (const float nan : all_kinds_of_nan()) {
    EXPECT_EQ(TypeParam::encode(nan), 0x7fff);
    EXPECT_EQ(TypeParam::encode(double(nan)), 0x7fff);
  }
  const uint32_t infinity = this->kDefinition.largest + 1;
  EXPECT_EQ(TypeParam::decode(uint16_t(infinity)), INFINITY);
  EXPECT_EQ(TypeParam::decode(uint16_t(infinity | 0x8000u)), -INFINITY);
  for (uint32_t code = infinity + 1; code <= 0x7fff; ++code)
    for (const uint32_t sign : {0u, 0x8000u})
      ASSERT_TRUE(std::isnan(TypeParam::decode(uint16_t(code | sign)))) << code;
}

TEST(Bf16, HoldsWhatItDecodesAndNothingBetween) {
  EXPECT_TRUE(Bf16::holds(std::ldexp(1.0, -133)));
  EXPECT_FALSE(Bf16::holds(std::ldexp(1.0, -134)));
  EXPECT_FALSE(Bf16::holds(1.0 + std::ldexp(1.0, -8)));
  EXPECT_TRUE(Bf16::holds(INFINITY));
  EXPECT_FALSE(Bf16::holds(std::ldexp(1.0, 128)));
  EXPECT_TRUE(Bf16::holds(std::nan("")));
}

// The conversions are usable in constant expressions.
static_assert(Bf16::encode(1.0f) == 0x3f80 && Fp16::encode(1.0f) == 0x3c00);
static_assert(Bf16::decode(0x3f80) == 1 && Fp16::decode(0x3c00) == 1 && Fp32::encode(1.0f) == 1);
static_assert(Bf16::encode(1.00390625000000022) == 0x3f81 && Bf16::encode(1.00390625) == 0x3f80);

}  // namespace
