// The comparator is tested first: every planted fault must be seen, and nothing else.
#include "tests/judge/close.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

#include "tests/judge/tensor.h"

using namespace cadre;
using test::difference;

namespace {

constexpr int64_t kRows = 7, kColumns = 13;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Fault : testing::Test {
  std::vector<double> want, got, bound;

  void SetUp() override {
    std::mt19937 random(11);
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < kRows * kColumns; ++i) want.push_back(normal(random));
    got = want;
    for (double w : want) bound.push_back(0.01 * std::abs(w) + 1e-9);
  }
  double& at(int64_t r, int64_t c) { return got[size_t(r * kColumns + c)]; }
  std::string seen() const { return difference(got, want, bound, kColumns); }
};

TEST_F(Fault, NoneIsSeenWhereNoneIs) {
  EXPECT_EQ(seen(), "");
  for (size_t i = 0; i < got.size(); ++i) got[i] += 0.9 * bound[i];
  EXPECT_EQ(seen(), "");
}
TEST_F(Fault, OneWrongElement) {
  at(3, 5) += 1.1 * bound[3 * kColumns + 5];
  EXPECT_NE(seen().find("1 of 91 elements are outside the bound; worst at [3, 5]"),
            std::string::npos)
      << seen();
}
TEST_F(Fault, ZeroRow) {
  for (int64_t c = 0; c < kColumns; ++c) at(2, c) = 0;
  EXPECT_NE(seen(), "");
}
TEST_F(Fault, NanAndInfinity) {
  at(0, 0) = kNan;
  EXPECT_NE(seen(), "");
  at(0, 0) = kInfinity;
  EXPECT_NE(seen(), "");
}
TEST_F(Fault, NanHidesNoOtherFault) {
  want[0] = got[0] = bound[0] = kNan;
  EXPECT_EQ(seen(), "");
  at(6, 12) += 1;
  EXPECT_NE(seen().find("1 of 91"), std::string::npos);
}
TEST_F(Fault, NumberWhereNanOrInfinityIsWanted) {
  want[4] = kNan;
  EXPECT_NE(seen(), "");
  want[4] = kInfinity;
  bound[4] = kInfinity;
  EXPECT_NE(seen(), "");
  got[4] = -kInfinity;
  EXPECT_NE(seen(), "");
  got[4] = kInfinity;
  EXPECT_EQ(seen(), "");
}
TEST_F(Fault, FlippedSign) {
  at(1, 1) = -at(1, 1);
  EXPECT_NE(seen(), "");
}
TEST_F(Fault, SwappedRows) {
  for (int64_t c = 0; c < kColumns; ++c) std::swap(at(4, c), at(5, c));
  EXPECT_NE(seen(), "");
}
TEST_F(Fault, ScaleOneExponentOff) {
  for (int64_t c = 0; c < kColumns; ++c) at(6, c) *= 2;
  EXPECT_NE(seen(), "");
}
TEST_F(Fault, MissingTail) {
  got.resize(got.size() - kColumns);
  EXPECT_NE(seen(), "");
}
TEST_F(Fault, NanBound) {
  bound[9] = kNan;
  got[9] += 1e-3;
  EXPECT_NE(seen(), "");
}

TEST(Rounding, IsReachedAtMidpointsAndNotExceeded) {
  float data = 0;
  for (DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    const TensorView v = view(&data, dtype, {1});
    std::mt19937 random(3);
    std::uniform_real_distribution<double> mantissa(1, 2), exponent(-30, 15);
    for (int i = 0; i < 20000; ++i) {
      const double x = std::ldexp(mantissa(random), int(exponent(random)));
      cpu::write(v, {}, x);
      EXPECT_LE(std::abs(cpu::read(v, 0) - x), test::rounding(dtype, x)) << name(dtype) << x;
    }
    const int precision = dtype == DType::kF32 ? 24 : dtype == DType::kF16 ? 11 : 8;
    const double midpoint = 1 + std::ldexp(1.0, -precision);
    cpu::write(v, {}, midpoint);
    EXPECT_GT(std::abs(cpu::read(v, 0) - midpoint), 0.99 * test::rounding(dtype, 1));
  }
}

TEST(Tensor, SeesDamageBeforeBehindAndBetweenRows) {
  for (int64_t at : {int64_t(-1), int64_t(5), int64_t(4 * 8)}) {
    test::Tensor t(DType::kF32, {4, 5}, {.row_gap = 3});
    EXPECT_EQ(t.damage(), "");
    static_cast<float*>(t.view().data)[at] = 1;
    EXPECT_NE(t.damage(), "") << at;
  }
}

TEST(Tensor, IsPoisonedUntilWritten) {
  test::Tensor t(DType::kBf16, {4, 5});
  EXPECT_TRUE(std::isnan(t.at(3, 4)));
  EXPECT_TRUE(t.untouched(0, 4));
  t.set({2, 0}, 1);
  EXPECT_FALSE(t.untouched(0, 4));
  EXPECT_TRUE(t.untouched(3, 4));
  EXPECT_EQ(t.at(2, 0), 1);
}

}  // namespace
