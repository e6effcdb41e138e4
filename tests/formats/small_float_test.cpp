// e4m3, e5m2, e2m1: every code, every midpoint, saturation, NaN, and the exact probabilities of
// stochastic rounding, counted over all random bits.
#include <gtest/gtest.h>

#include "definition.h"
#include "formats/small_float.h"

using namespace cadre;
using namespace cadre::formats;
using namespace cadre::test;

namespace {

template <class Float>
constexpr FloatDefinition definition_of() {
  if constexpr (Float::kDType == DType::kE4m3) return kE4m3Definition;
  if constexpr (Float::kDType == DType::kE5m2) return kE5m2Definition;
  if constexpr (Float::kDType == DType::kE2m1) return kE2m1Definition;
}

template <class Float>
struct SmallFloats : testing::Test {
  static constexpr FloatDefinition kDefinition = definition_of<Float>();
  static constexpr uint32_t kSign = 1u << (Float::kExponentBits + Float::kMantissaBits);
  static void expect_nearest(float x) {
    ASSERT_EQ(Float::encode(x), signed_code(kDefinition, x)) << std::hexfloat << x;
  }
};
using Floats = testing::Types<E4m3, E5m2, E2m1>;
TYPED_TEST_SUITE(SmallFloats, Floats);

TYPED_TEST(SmallFloats, DecodesEveryFiniteCodeAndEncodesItBack) {
  for (uint32_t code = 0; code <= this->kDefinition.largest; ++code)
    for (const uint32_t sign : {0u, this->kSign}) {
      const float value = TypeParam::decode(uint8_t(code | sign));
      EXPECT_EQ(value, (sign ? -1 : 1) * value_of(this->kDefinition, code)) << code;
      EXPECT_EQ(std::signbit(value), sign != 0) << code;
      EXPECT_EQ(TypeParam::encode(value), code | sign) << code;
    }
}

TYPED_TEST(SmallFloats, RoundsToTheNearestCodeAtEveryValueAndMidpoint) {
  for_values_and_midpoints(this->kDefinition, this->expect_nearest);
  for_extremes_and_random(1'000'000, this->expect_nearest);
}

TYPED_TEST(SmallFloats, SaturatesInfinitiesAndTurnsEveryNanIntoOneCode) {
  EXPECT_EQ(TypeParam::encode(INFINITY), this->kDefinition.largest);
  EXPECT_EQ(TypeParam::encode(-INFINITY), this->kDefinition.largest | this->kSign);
  for (const float nan : all_kinds_of_nan()) {
    EXPECT_EQ(TypeParam::encode(nan), this->kSign - 1);
    EXPECT_EQ(TypeParam::encode_stochastic(nan, 0xffff), this->kSign - 1);
  }
}

TYPED_TEST(SmallFloats, StatesItsOwnNumbers) {
  EXPECT_EQ(TypeParam::kLargest, value_of(this->kDefinition, this->kDefinition.largest));
  EXPECT_EQ(TypeParam::kSmallest, value_of(this->kDefinition, 1));
  EXPECT_EQ(TypeParam::kSmallestNormal,
            value_of(this->kDefinition, 1u << this->kDefinition.mantissa_bits));
  EXPECT_EQ(TypeParam::kLargestCode, this->kDefinition.largest);
}

TEST(E4m3, HasOneNanOfEachSignAndNoInfinity) {
  for (uint32_t code = 0; code < 256; ++code)
    EXPECT_EQ(std::isnan(E4m3::decode(uint8_t(code))), (code & 0x7f) == 0x7f) << code;
  EXPECT_TRUE(E4m3::kHasNan);
}

TEST(E5m2, DecodesInfinitiesAndNanLikeIeee) {
  EXPECT_EQ(E5m2::decode(0x7c), INFINITY);
  EXPECT_EQ(E5m2::decode(0xfc), -INFINITY);
  for (const int code : {0x7d, 0x7e, 0x7f, 0xfd, 0xfe, 0xff})
    EXPECT_TRUE(std::isnan(E5m2::decode(uint8_t(code)))) << code;
  EXPECT_TRUE(E5m2::kHasNan);
}

TEST(E2m1, HasTheEightValuesOfTheStandardAndNoNan) {
  const float want[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (int code = 0; code < 8; ++code) EXPECT_EQ(E2m1::decode(uint8_t(code)), want[code]);
  EXPECT_FALSE(E2m1::kHasNan);
}

TEST(E2m1, PacksTheEvenElementIntoTheLowNibble) {
  const uint8_t byte = pack_nibbles(0x3, 0xa);
  EXPECT_EQ(byte, 0xa3);
  EXPECT_EQ(nibble(byte, 0), 0x3);
  EXPECT_EQ(nibble(byte, 7), 0xa);
}

/// How often each of two neighbouring codes comes out, over all 2^16 random values.
template <class Float>
void expect_exact_probability(float x) {
  const FloatDefinition f = definition_of<Float>();
  const double m = std::abs(double(x));
  uint32_t below = 0;
  while (below < f.largest && value_of(f, below + 1) <= m) ++below;
  const double low = value_of(f, below), step = value_of(f, below + 1) - low;
  const double scaled = below == f.largest ? 0 : (m - low) / step * 65536;
  const int want = int(std::ceil(scaled - 0.5));  // nearest, the lower one of two
  const uint32_t sign = std::signbit(x) ? 1u << (Float::kExponentBits + Float::kMantissaBits) : 0;
  int up = 0;
  for (uint32_t random = 0; random < 0x10000; ++random) {
    const uint32_t got = Float::encode_stochastic(x, random);
    ASSERT_TRUE(got == (below | sign) || got == ((below + 1) | sign)) << std::hexfloat << x;
    up += got != (below | sign);
  }
  EXPECT_EQ(up, want) << std::hexfloat << x;
}

TYPED_TEST(SmallFloats, RoundsStochasticallyWithExactProbabilities) {
  const FloatDefinition& f = this->kDefinition;
  std::mt19937 random(7);
  const uint32_t stride = f.largest / 24 + 1;
  for (uint32_t code = 0; code < f.largest; code += stride) {
    const double low = value_of(f, code), step = value_of(f, code + 1) - low;
    for (const double part : {0.0, 1.0 / 65536, 1.5 / 65536, 0.25, 0.5, 1 - 1.0 / 65536})
      expect_exact_probability<TypeParam>(float(low + part * step));
    expect_exact_probability<TypeParam>(-float(low + std::ldexp(random(), -32) * step));
  }
  for (const float x : {TypeParam::kLargest, -2 * TypeParam::kLargest, INFINITY, 0.0f, -0.0f,
                        std::numeric_limits<float>::denorm_min()})
    expect_exact_probability<TypeParam>(x);
}

TYPED_TEST(SmallFloats, RoundsStochasticallyWithoutBias) {
  // The mean over all random values is x itself, where x is a multiple of 2^-16 of its step.
  for (const float x : {1.25f, 1.7f, 0.3f, 0.8f, 2.9f, 0.007f}) {
    double sum = 0;
    for (uint32_t r = 0; r < 0x10000; ++r)
      sum += TypeParam::decode(TypeParam::encode_stochastic(x, r));
    const double step = std::max<double>(TypeParam::kSmallest, x);  // of x, or larger
    EXPECT_NEAR(sum / 65536, x, step / 131072);
  }
}

// The conversions are usable in constant expressions.
static_assert(E4m3::encode(448.0f) == 0x7e && E4m3::encode(-1e9f) == 0xfe &&
              E4m3::decode(1) == pow2(-9));
static_assert(E5m2::encode(0.0f) == 0 && E5m2::decode(0x7b) == 57344);
static_assert(E2m1::encode(0.25f) == 0 && E2m1::encode(0.75f) == 2 && E2m1::decode(0xf) == -6);
static_assert(E2m1::encode_stochastic(1.25f, 0) == 3 &&
              E2m1::encode_stochastic(1.25f, 0xffff) == 2);

}  // namespace
