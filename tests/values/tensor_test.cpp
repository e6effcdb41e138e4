#include "cadre/tensor.h"

#include <gtest/gtest.h>

#include "cadre/error.h"

using namespace cadre;

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
