// The comparison of `cadre check`, tested with planted faults: each must be seen.
#include "bench/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "bench/element.h"

using namespace cadre;
using bench::Buffers;
using bench::Difference;
using bench::Magnitude;
using bench::Output;

namespace {

constexpr int64_t kRows = 7, kColumns = 5, kLive = 4;

// Two equal outputs of a sum of three terms, with a poisoned tail, for a test to damage.
struct Pair {
  explicit Pair(DType dtype = DType::kF32, Tail tail = Tail::kKeep) {
    for (Output* out : {&want, &got}) {
      *out = {"y", buffers.tensor(dtype, {kRows, kColumns}), kLive, tail};
      before = bench::snapshot(*out);
      bench::fill_normal(out->view, kLive, 3);
    }
    sizes = {std::vector<float>(kRows * kColumns, 3.0f), 3};
  }
  Difference compare() const { return bench::compare(got, want, sizes, before); }
  float at(int64_t i) const { return bench::load(got.view, i); }
  void set(int64_t i, float value) { bench::store(got.view, i, value); }

  Buffers buffers;
  Output want, got;
  Magnitude sizes;
  std::vector<std::byte> before;
};

}  // namespace

TEST(Compare, EqualBitsHaveNoError) {
  const Pair p;
  EXPECT_EQ(p.compare().of_bound, 0);
  EXPECT_TRUE(p.compare().where.empty());
}

TEST(Compare, AnErrorWithinTheBoundIsMeasured) {
  Pair p;
  const float value = p.at(7);
  const double bound = bench::gamma(3) * 3 + bench::step_at(DType::kF32, value);
  p.set(7, float(value + bound / 2));
  EXPECT_TRUE(p.compare().good());
  EXPECT_NEAR(p.compare().of_bound, 0.5, 0.1);
}

TEST(Compare, SeesOneWrongElement) {
  Pair p;
  p.set(8, p.at(8) + 1e-5f);
  EXPECT_FALSE(p.compare().good());
  EXPECT_EQ(p.compare().where.find("y[1, 3] is "), 0u) << p.compare().where;
}

TEST(Compare, SeesAZeroRow) {
  Pair p;
  for (int64_t j = 0; j < kColumns; ++j) p.set(2 * kColumns + j, 0);
  EXPECT_FALSE(p.compare().good());
}

TEST(Compare, SeesNaNAndInfinity) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    Pair p;
    p.set(0, bad);
    EXPECT_FALSE(p.compare().good()) << bad;
  }
}

TEST(Compare, SeesAMissingNaN) {
  Pair p;
  bench::store(p.want.view, 3, std::numeric_limits<float>::quiet_NaN());
  EXPECT_FALSE(p.compare().good());
}

TEST(Compare, SeesAFlippedSign) {
  Pair p;
  p.set(11, -p.at(11));
  EXPECT_FALSE(p.compare().good());
}

TEST(Compare, SeesNegativePairs) {
  Pair p;
  bench::store(p.want.view, 1, -2);
  p.set(1, -100);
  EXPECT_FALSE(p.compare().good());
}

TEST(Compare, SeesSwappedRows) {
  Pair p;
  for (int64_t j = 0; j < kColumns; ++j) {
    const float first = p.at(j);
    p.set(j, p.at(kColumns + j));
    p.set(kColumns + j, first);
  }
  EXPECT_FALSE(p.compare().good());
}

TEST(Compare, SeesAScaleOneExponentOff) {
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    Pair p(dtype);
    for (int64_t i = 0; i < kLive * kColumns; ++i) p.set(i, p.at(i) * 2);
    EXPECT_FALSE(p.compare().good());
  }
}

TEST(Compare, OneStepOfTheOutputIsAllowedAndTwoAreNot) {
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    Pair p(dtype);
    bench::store(p.want.view, 0, 1.0f);
    p.set(0, float(1 + bench::step_at(dtype, 1)));
    EXPECT_TRUE(p.compare().good());
    p.set(0, float(1 + 2 * bench::step_at(dtype, 1)));
    EXPECT_FALSE(p.compare().good());
  }
}

TEST(Compare, SeesATailThatWasWritten) {
  Pair p;
  p.set(kLive * kColumns + 2, 0);
  EXPECT_FALSE(p.compare().good());
  EXPECT_EQ(p.compare().where.find("tail or gap: "), 0u);
}

TEST(Compare, SeesATailThatWasNotZeroed) {
  Pair p(DType::kBf16, Tail::kZero);
  EXPECT_FALSE(p.compare().good());
  for (int64_t i = kLive * kColumns; i < kRows * kColumns; ++i) p.set(i, 0);
  EXPECT_TRUE(p.compare().good());
}

TEST(Compare, SeesAGapBetweenRowsThatWasWritten) {
  Pair p;
  for (Output* out : {&p.want, &p.got}) {
    out->view.shape[1] = kColumns - 1;
    out->view.stride[0] = kColumns;
  }
  p.before = bench::snapshot(p.got);
  std::memset(p.before.data(), 0, p.before.size());
  EXPECT_FALSE(p.compare().good());
}

TEST(Compare, ExactOutputsMustEqualToTheLastByte) {
  Pair p;
  p.want.exact = p.got.exact = true;
  EXPECT_TRUE(p.compare().good());
  p.set(8, std::nextafter(p.at(8), 9.0f));
  EXPECT_FALSE(p.compare().good());
}

TEST(Compare, CanariesDieWhenNeighboursWrite) {
  Buffers buffers;
  auto* first = buffers.array<char>(100);
  EXPECT_TRUE(buffers.canaries_live());
  const char kept = first[100];
  first[100] = 0;
  EXPECT_FALSE(buffers.canaries_live());
  first[100] = kept;
  EXPECT_TRUE(buffers.canaries_live());
  first[-1] = 0;
  EXPECT_FALSE(buffers.canaries_live());
}

TEST(Element, StoringRoundsToNearestEvenAndLoadingGivesItBack) {
  for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
    Buffers buffers;
    const TensorView v = buffers.tensor(dtype, {1});
    EXPECT_TRUE(std::isnan(bench::load(v, 0))) << "poison";
    const double step = bench::step_at(dtype, 1);
    for (const double value : {1.0, -0.5, 1 + step, std::ldexp(1.0, -15), 0.0, 60928.0}) {
      bench::store(v, 0, float(value));
      EXPECT_EQ(bench::load(v, 0), float(value));
    }
    if (dtype == DType::kF32) continue;
    bench::store(v, 0, float(1 + step / 2));
    EXPECT_EQ(bench::load(v, 0), 1);
    bench::store(v, 0, float(1 + step * 3 / 2));
    EXPECT_EQ(bench::load(v, 0), float(1 + 2 * step));
  }
}
