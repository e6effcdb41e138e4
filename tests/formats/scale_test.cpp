// The scale rules: steps and corner cases of each, and which products are bf16 numbers.
#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "formats/list.h"

using namespace cadre;
using namespace cadre::formats;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kTiny = std::numeric_limits<float>::denorm_min();

TEST(Fp32Scale, IsTheIeeeQuotient) {
  std::mt19937 random(1);
  for (int i = 0; i < 100'000; ++i) {
    const float amax = float_of(uint32_t(random()) & kMagnitudeBits);
    if (!is_finite(amax) || amax < 1e-30f) continue;
    // A quotient of floats in double is far enough from every midpoint of floats to round twice.
    EXPECT_EQ(fp32_multiplier(amax, 448, 1, {}), float(448.0 / double(amax)));
  }
}

TEST(Fp32Scale, IsOneWhereThereIsNothingToScaleBy) {
  for (const float amax : {0.0f, kInf, kNaN})
    EXPECT_EQ(fp32_multiplier(amax, 448, 7, {}), 1) << amax;
}

TEST(Fp32Scale, AnInfiniteQuotientBecomesWhatTheFormatSays) {
  EXPECT_EQ(fp32_multiplier(kTiny, 448, kLargestFloat, {}), kLargestFloat);
  EXPECT_EQ(fp32_multiplier(kTiny, 448, Bf16::kLargest, {}), Bf16::kLargest);
  EXPECT_EQ(fp32_multiplier(kTiny, 448, Bf16::kLargest, {.power_of_two = true}), pow2(127));
}

TEST(Fp32Scale, EpsBoundsAnAmaxFromBelowButNotNan) {
  EXPECT_EQ(fp32_multiplier(1, 448, 1, {.amax_eps = 4}), 112);
  EXPECT_EQ(fp32_multiplier(0, 448, 1, {.amax_eps = 4}), 112);
  EXPECT_EQ(fp32_multiplier(8, 448, 1, {.amax_eps = 4}), 56);
  EXPECT_EQ(fp32_multiplier(kNaN, 448, 3, {.amax_eps = 4}), 1);
}

TEST(Fp32Scale, PowersOfTwoRoundDown) {
  const ScaleOptions pow2_only{.power_of_two = true};
  EXPECT_EQ(fp32_multiplier(448, 448, 1, pow2_only), 1);
  EXPECT_EQ(fp32_multiplier(449, 448, 1, pow2_only), 0.5f);
  EXPECT_EQ(fp32_multiplier(1, 448, 1, pow2_only), 256);
}

TEST(Fp32Scale, PowersOfTwoNeedNoDivision) {
  const ScaleOptions pow2_only{.power_of_two = true};
  for (const float largest : {E4m3::kLargest, E5m2::kLargest})
    for (uint32_t bits = 1; bits < kInfinityBits; bits += bits < 0x0900'0000u ? 61 : 4093) {
      const float amax = float_of(bits), quotient = largest / amax;
      const float number = is_finite(quotient) ? quotient : Bf16::kLargest;
      const float want = float_of(bits_of(number) & kInfinityBits);
      const float got = fp32_multiplier(amax, largest, Bf16::kLargest, pow2_only);
      ASSERT_EQ(got, want) << amax;
      ASSERT_EQ(fp32_scale(got, pow2_only), 1 / want) << amax;
    }
  // Around each mantissa at which the quotient passes a power of two.
  for (uint32_t exponent = 8; exponent < 255; ++exponent)
    for (const uint32_t mantissa : {0x5f'ffffu, 0x60'0000u, 0x60'0001u}) {
      const float amax = float_of(exponent << 23 | mantissa);
      const float want = float_of(bits_of(448 / amax) & kInfinityBits);
      ASSERT_EQ(fp32_multiplier(amax, 448, 1, pow2_only), want) << amax;
    }
}

TEST(Fp8Tensor, StoresTheReciprocalOfItsMultiplier) {
  const ExpertScale got = Fp8Tensor::expert_scale<E5m2>(3, {});
  EXPECT_EQ(got.encode, 57344.0f / 3.0f);
  EXPECT_EQ(got.scale, 1.0f / got.encode);
  EXPECT_EQ(Fp8Tensor::block_scale<E5m2>(9, got, {}).multiplier, got.encode);
  EXPECT_EQ(Fp8Tensor::expert_scale<E4m3>(kTiny, {}).encode, kLargestFloat);
  EXPECT_EQ(Fp8Tensor::expert_scale<E4m3>(kTiny, {}).scale, 1.0f / kLargestFloat);  // a subnormal
}

TEST(Fp8Block, BoundsItsMultiplierByTheSourceType) {
  const auto multiplier = [](float amax, float largest_source) {
    return Fp8Block::block_scale<E4m3>(amax, {}, {.largest_source = largest_source}).multiplier;
  };
  EXPECT_EQ(multiplier(kTiny, Bf16::kLargest), Bf16::kLargest);
  EXPECT_EQ(multiplier(kTiny, Fp32::kLargest), kLargestFloat);
  EXPECT_EQ(multiplier(1, Bf16::kLargest), 448);
  const auto block = Fp8Block::block_scale<E4m3>(3, {}, {.power_of_two = true});
  EXPECT_EQ(block.multiplier, 128);
  EXPECT_EQ(block.code, pow2(-7));
}

TEST(Mx, ScalesByTheFloatReciprocalOfTheLargestElement) {
  EXPECT_EQ(Mxfp8::block_scale<E4m3>(448, {}, {}).code, 127);
  EXPECT_EQ(Mxfp8::block_scale<E4m3>(std::nextafter(448.0f, kInf), {}, {}).code, 128);
  EXPECT_EQ(Mxfp8::block_scale<E5m2>(57344, {}, {}).multiplier, 1);
  EXPECT_EQ(Mxfp8::block_scale<E4m3>(511, {}, {.floor = true}).code, 127);
  EXPECT_EQ(Mxfp4::block_scale<E2m1>(0, {}, {}).code, 0);
  EXPECT_EQ(Mxfp4::block_scale<E2m1>(kInf, {}, {}).code, 254);
  EXPECT_EQ(Mxfp4::block_scale<E2m1>(kInf, {}, {}).multiplier, pow2(-127));
  EXPECT_EQ(Mxfp4::block_scale<E2m1>(kNaN, {}, {}).code, 255);
  EXPECT_TRUE(std::isnan(Mxfp4::block_scale<E2m1>(kNaN, {}, {}).multiplier));
  // fl(1 / 6) lies above 1/6: an amax of 6 reaches past 1 and gets the next power of two.
  EXPECT_EQ(Mxfp4::block_scale<E2m1>(6, {}, {}).code, mul(6, 1.0f / 6.0f) > 1 ? 128 : 127);
}

TEST(Nvfp4, ExpertScaleMapsTheAmaxToTheLargestProduct) {
  EXPECT_EQ(Nvfp4::kLargestProduct, 2688);
  const ExpertScale got = Nvfp4::expert_scale<E2m1>(5, {});
  EXPECT_EQ(got.encode, 2688.0f / 5.0f);
  EXPECT_EQ(got.scale, 1.0f / got.encode);
  for (const float amax : {0.0f, kInf, kNaN}) {
    EXPECT_EQ(Nvfp4::expert_scale<E2m1>(amax, {}).encode, 1) << amax;
    EXPECT_EQ(Nvfp4::expert_scale<E2m1>(amax, {}).scale, 1) << amax;
  }
  EXPECT_EQ(Nvfp4::expert_scale<E2m1>(kTiny, {}).encode, kLargestFloat);
}

TEST(Nvfp4, BlockScaleOfTheLargestBlockIsTheLargestScale) {
  const ExpertScale expert = Nvfp4::expert_scale<E2m1>(5, {});
  const auto largest = Nvfp4::block_scale<E2m1>(5, expert, {});
  EXPECT_EQ(largest.code, E4m3::kLargestCode);
  EXPECT_NEAR(largest.multiplier * 5, 6, 1e-5);
  const auto zero = Nvfp4::block_scale<E2m1>(0, expert, {});
  EXPECT_EQ(zero.code, 0);
  EXPECT_EQ(zero.multiplier, kLargestFloat);
  const auto nan = Nvfp4::block_scale<E2m1>(kNaN, expert, {});
  EXPECT_EQ(nan.code, E4m3::kNanCode);
  EXPECT_TRUE(std::isnan(nan.multiplier));
  EXPECT_EQ(Nvfp4::block_scale<E2m1>(kInf, {}, {}).code, E4m3::kLargestCode);
}

TEST(Nvfp4, RoundsEveryStepOfItsFormulaOnce) {
  std::mt19937 random(3);
  const auto fl = [](double x) { return float(x); };  // one product or quotient of floats: exact
  for (int i = 0; i < 50'000; ++i) {
    const float a = std::ldexp(1 + float(random()) / 4.3e9f, int(random() % 40) - 20);
    const float b = a * (float(random() % 1000) / 1000.0f);
    const float s = fl(2688.0 / double(a)), sixth = fl(1.0 / 6.0);
    const ExpertScale expert = Nvfp4::expert_scale<E2m1>(a, {});
    ASSERT_EQ(expert.encode, s);
    ASSERT_EQ(expert.scale, fl(1.0 / double(s)));
    const auto block = Nvfp4::block_scale<E2m1>(b, expert, {});
    const float d = E4m3::decode(E4m3::encode(fl(double(b) * fl(double(s) * sixth))));
    ASSERT_EQ(E4m3::decode(block.code), d);
    if (d != 0) {
      ASSERT_EQ(block.multiplier, fl(1.0 / double(fl(double(d) * expert.scale))));
    }
  }
}

/// True if code * scale is a bf16 number for every code of the element.
template <class Element>
bool all_products_in_bf16(double scale) {
  for (int code = 0; code <= Element::kMaxCode; ++code)
    if (!Bf16::holds(double(Element::decode(uint8_t(code))) * scale)) return false;
  return true;
}

/// Scale codes for which all products are bf16 numbers must be `first` to `last`, and no others.
template <class Element>
void expect_exact_range(int first, int last) {
  for (int scale = 0; scale < 255; ++scale)
    EXPECT_EQ(all_products_in_bf16<Element>(E8m0::decode(uint8_t(scale))),
              first <= scale && scale <= last)
        << scale;
}

TEST(Exactness, OfMxProductsInBf16IsWhatTheHeadersState) {
  expect_exact_range<E4m3>(3, 246);
  expect_exact_range<E5m2>(10, 239);
  expect_exact_range<E2m1>(0, 252);
}

TEST(Exactness, EveryNvfp4ProductIsABf16Number) {
  for (int scale = 0; scale < 256; ++scale)
    EXPECT_TRUE(all_products_in_bf16<E2m1>(E4m3::decode(uint8_t(scale)))) << scale;
}

/// fp32 holds every product of an 8- or 4-bit code with an e8m0 or e4m3 scale, or it overflows in
/// both; so rounding the fp32 product to bf16 rounds once.
template <class Element, class Scale>
void expect_fp32_exact() {
  for (int scale = 0; scale < 256; ++scale)
    for (int code = 0; code <= Element::kMaxCode; ++code) {
      const float c = Element::decode(uint8_t(code)), s = Scale::decode(uint8_t(scale));
      const double product = double(c) * double(s);
      if (std::isnan(product)) continue;
      ASSERT_EQ(double(mul(c, s)), std::abs(product) >= std::ldexp(1.0, 128)
                                       ? std::copysign(double(kInf), product)
                                       : product)
          << code << " " << scale;
      ASSERT_EQ(Bf16::encode(mul(c, s)), Bf16::encode(product)) << code << " " << scale;
    }
}

TEST(Exactness, Fp32HoldsEveryProductOfCodeAndScale) {
  expect_fp32_exact<E4m3, E8m0>();
  expect_fp32_exact<E5m2, E8m0>();
  expect_fp32_exact<E2m1, E8m0>();
  expect_fp32_exact<E2m1, E4m3>();
}

TEST(List, IsInTheOrderOfTheKindsAndVisitsByThem) {
  int seen = 0;
  for_each(All{}, [&]<class F>() {
    EXPECT_EQ(int(F::kInfo.kind), seen++);
    int visited = 0;
    visit(F::kInfo.kind, [&]<class G>() {
      EXPECT_EQ(F::kInfo.name, G::kInfo.name);
      ++visited;
    });
    EXPECT_EQ(visited, 1);
    EXPECT_EQ(F::kInfo.scale, F::Scale::kDType) << F::kInfo.name;
    EXPECT_TRUE(visit(Elements{}, F::kInfo.element, []<class>() {})) << F::kInfo.name;
    EXPECT_TRUE(visit(typename F::Elements{}, F::kInfo.element, []<class>() {})) << F::kInfo.name;
    EXPECT_EQ(visit(typename F::Elements{}, DType::kE5m2, []<class>() {}), F::kInfo.takes_e5m2);
  });
  EXPECT_FALSE(visit(Elements{}, DType::kE8m0, []<class>() {}));
}

}  // namespace
