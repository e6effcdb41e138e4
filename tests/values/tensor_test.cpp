#include "cadre/tensor.h"

#include <gtest/gtest.h>

#include <locale>
#include <random>

#include "cadre/error.h"
#include "tests/judge/errors.h"

using namespace cadre;
using test::invalid;

TEST(TensorView, IsRowMajorByDefaultAndPrints) {
  const TensorView v = view(nullptr, DType::kBf16, {3, 5, 7});
  EXPECT_EQ(v.stride[0], 35);
  EXPECT_EQ(v.stride[2], 1);
  EXPECT_EQ(elements(v), 105);
  EXPECT_TRUE(is_contiguous(v));
  EXPECT_EQ(to_string(v), "bf16[3, 5, 7]");
}

TEST(TensorView, PrintsStridesOnlyWhereTheyMatter) {
  const TensorView v = view(nullptr, DType::kF32, {3, 5}, {8, 1});
  EXPECT_FALSE(is_contiguous(v));
  EXPECT_EQ(to_string(v), "f32[3, 5] strides (8, 1)");
  EXPECT_TRUE(is_contiguous(view(nullptr, DType::kF32, {1, 5}, {99, 1})));
}

TEST(TensorView, TransposedExchangesTheLastTwoDimensions) {
  const TensorView v = transposed(view(nullptr, DType::kBf16, {2, 3, 5}, {40, 8, 1}));
  EXPECT_EQ(to_string(v), "bf16[2, 5, 3] strides (40, 1, 8)");
  EXPECT_EQ(to_string(transposed(transposed(v))), to_string(v));
}

TEST(TensorView, PrintsTheSameInEveryLocale) {
  struct Grouping : std::numpunct<char> {
    std::string do_grouping() const override { return "\3"; }
  };
  const std::locale before = std::locale::global(
      std::locale(std::locale::classic(), new Grouping));  // NOLINT: the locale owns it
  const std::string words = to_string(view(nullptr, DType::kBf16, {4096, 2048}));
  std::locale::global(before);
  EXPECT_EQ(words, "bf16[4096, 2048]");
}

TEST(TensorView, CountsAsFarAsNumbersGo) {
  EXPECT_EQ(bytes_for(DType::kI64, int64_t{1} << 57), int64_t{1} << 60);
  EXPECT_EQ(bytes_for(DType::kE2m1, 3), 2);
  TensorView v;
  v.rank = 3;
  v.shape = {0, int64_t{1} << 40, int64_t{1} << 40};
  EXPECT_EQ(elements(v), 0);
}

TEST(TensorView, OfSizesThatDoNotFitIsRefused) {
  constexpr int64_t kHuge = int64_t{1} << 62;
  EXPECT_EQ(invalid([] {
              view(nullptr, DType::kF32, {2, kHuge, 1});
            }),
            "view: dimension 0 is 2, must be smaller; the view has 2^63 elements or more");
  EXPECT_EQ(invalid([] {
              view(nullptr, DType::kF32, {1, 2, 3, 4, 5});
            }),
            "view: rank is 5, must be at most 4");
  EXPECT_EQ(invalid([] { transposed(view(nullptr, DType::kF32, {3})); }),
            "view: rank is 1, must be 2 to 4; there is no matrix to transpose");
}

TEST(TensorView, ThatHoldsAnythingPrints) {
  TensorView v;
  v.rank = 7;
  EXPECT_EQ(to_string(v), "f32 of rank 7");
  v.dtype = DType(99);
  v.rank = 1;
  v.shape[0] = INT64_MIN;
  v.stride[0] = INT64_MAX;
  EXPECT_EQ(to_string(v), "unknown type[-9223372036854775808] strides (9223372036854775807)");
}

// Lengths and strides near 2^31 and 2^63, against arithmetic of 128 bits.
TEST(TensorView, OfAnySizesIsCountedOrRefused) {
  constexpr int64_t kLengths[] = {0,
                                  1,
                                  2,
                                  3,
                                  INT32_MAX,
                                  int64_t{1} << 31,
                                  int64_t{1} << 32,
                                  int64_t{1} << 61,
                                  int64_t{1} << 62,
                                  INT64_MAX};
  std::mt19937 random(5);
  int refused = 0;
  for (int i = 0; i < 2000; ++i) {
    std::array<int64_t, 3> shape;
    for (int64_t& length : shape) length = kLengths[random() % std::size(kLengths)];
    __int128 count = 1;
    bool fits = true;
    for (int d = 2; d >= 0 && fits; --d) fits = (count *= shape[size_t(d)]) <= INT64_MAX;
    TensorView v;
    const std::string why = invalid([&] {
      v = view(nullptr, DType::kF32, {shape[0], shape[1], shape[2]});
    });
    EXPECT_EQ(why == "nothing was thrown", fits) << why;
    refused += !fits;
    if (!fits) continue;
    EXPECT_EQ(elements(v), int64_t(count));
    EXPECT_TRUE(is_contiguous(v)) << to_string(v);
    v.stride[random() % 3] = kLengths[random() % std::size(kLengths)];
    EXPECT_NE(to_string(v), "");
  }
  EXPECT_GT(refused, 200);
}

TEST(DType, NamesParseBackAndUnknownOnesListTheKnown) {
  for (int i = 0; i <= int(DType::kU8); ++i) EXPECT_EQ(parse_dtype(name(DType(i))), DType(i));
  EXPECT_EQ(parse_dtype("bfloat16"), DType::kBf16);
  EXPECT_EQ(bytes_for(DType::kE2m1, 5), 3);
  try {
    parse_dtype("fp6");
    FAIL();
  } catch (const InvalidArgument& e) {
    EXPECT_STREQ(e.what(),
                 "dtype: name is 'fp6', must be one of f32, bf16, f16, e4m3, e5m2, e2m1, e8m0, "
                 "i32, i64, u8");
  }
}
