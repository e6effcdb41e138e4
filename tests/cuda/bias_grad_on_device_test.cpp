// dbias on the GPU is the reference's within the bound; dbias_scale has the bits of the CPU's.
#include "cadre/bias_grad.h"

#include "tests/cuda/mirror.h"
#include "tests/judge/close.h"
#include "tests/ops/bias_grad_case.h"

namespace cadre {
namespace {

using test::Counts;
using test::CountsKind;
using test::Tensor;
using Case = test::BiasGradCase;

void on_gpu(Case& c) {
  test::Mirror mirror;
  const BiasGradPlan made = plan(c.p, test::first_gpu());
  EXPECT_EQ(made.name, "cuda_bias_grad");
  const BiasGradArgs given = c.args([&](const Tensor& t) { return mirror.view(t); },
                                    [&](auto& all) { return mirror.data(all); });
  mirror.replay(1, [&](Stream stream) { run(made, given, {}, stream); });
}

/// A product and a sum for each row, what was there, and one rounding each.
void expect_dbias(const Case& got, const Case& want, const Case& before) {
  const BiasGradProblem& p = got.p;
  std::vector<double> bound;
  for (int64_t at = 0; at < p.experts; ++at) {
    const int e = int(before.row_of_expert(int(at)));
    const int64_t first = got.offsets[size_t(e)], last = got.offsets[size_t(e) + 1];
    for (int64_t n = 0; n < p.n; ++n) {
      double magnitude = before.adds(e) ? std::abs(before.dbias.at(at, n)) : 0;
      for (int64_t r = first; r < last; ++r) magnitude += std::abs(before.dy.at(r, n));
      bound.push_back(first >= last ? 0
                                    : test::gamma(last - first + 2, magnitude) +
                                          2 * test::rounding(p.dbias, want.dbias.at(at, n)));
    }
  }
  EXPECT_EQ(test::difference(got.dbias.values(), want.dbias.values(), bound, p.n), "")
      << to_string(p);
  EXPECT_EQ(got.dbias.damage(), "");
}

void check(const BiasGradProblem& p, const Counts& counts, int64_t gap, unsigned seed) {
  const Case before(p, counts, seed, gap);
  Case got = before, again = before, fast = before, want = before;
  on_gpu(got);
  on_gpu(again);
  fast.on_cpu("cpu");
  want.on_cpu("cpu_reference");
  expect_dbias(got, want, before);
  EXPECT_EQ(got.dbias.bytes() == again.dbias.bytes(), true) << to_string(p);
  EXPECT_EQ(got.dbias_scale.bytes() == fast.dbias_scale.bytes(), true) << to_string(p);
}

using BiasGradOnDevice = test::OnDevice;

TEST_F(BiasGradOnDevice, IsTheReferenceWithinTheBound) {
  constexpr DType kTypes[] = {DType::kF32, DType::kBf16, DType::kF16};
  unsigned seed = 0;
  test::for_random_counts(test::sized(420, 140), 7, [&](const Counts& counts) {
    ++seed;
    if (counts.experts() > 64 && seed % 8 != 0) return;
    const BiasGradProblem p{.rows = counts.rows,
                            .n = std::array<int64_t, 6>{1, 7, 128, 150, 64, 1032}[seed / 3 % 6],
                            .experts = counts.experts(),
                            .dy = kTypes[seed % 3],
                            .dbias = kTypes[seed / 3 % 3],
                            .discrete = seed % 2 == 0,
                            .bias_scale = seed % 5 < 3,
                            .bias = kTypes[seed / 9 % 3],
                            .accumulate = Accumulate(seed / 2 % 4),
                            .tail = Tail(seed / 4 % 2)};
    check(p, counts, seed / 2 % 3 * 4, seed);
  });
}

TEST_F(BiasGradOnDevice, OfManyRowsInOneExpert) {
  for (bool scale : {false, true})
    check({.rows = 1300, .n = 136, .experts = 4, .bias_scale = scale},
          {.rows = 1300, .of = {0, 1203, 0, 7}}, 0, 5);
}

// Experts of so many rows have their blocks in another order.
TEST_F(BiasGradOnDevice, OfManyRowsInAllExperts) {
  check({.rows = 2060, .n = 40, .experts = 2, .bias_scale = true},
        {.rows = 2060, .of = {1031, 1000}}, 0, 5);
}

TEST_F(BiasGradOnDevice, AColumnHas32PartialSums) {
  for (bool scale : {false, true}) {
    const BiasGradProblem p{
        .rows = 400, .n = 200, .experts = 4, .dbias = DType::kF32, .bias_scale = scale};
    Case c(p, {.rows = 400, .of = {3, 0, 250, 100}}, 9);
    on_gpu(c);
    for (int e = 0; e < p.experts; ++e)
      for (int64_t n = 0; n < p.n; ++n) {
        float sums[32] = {};
        const int64_t first = c.offsets[size_t(e)];
        for (int64_t r = first; r < c.offsets[size_t(e) + 1]; ++r)
          sums[(r - first) % 32] += (scale ? float(c.bias_scale.at(r)) : 1) * float(c.dy.at(r, n));
        for (int half = 16; half > 0; half /= 2)
          for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
        ASSERT_EQ(c.dbias.at(e, n), double(sums[0])) << e << ' ' << n << ' ' << to_string(p);
      }
  }
}

TEST_F(BiasGradOnDevice, BrokenOffsetsAreWalked) {
  std::mt19937 random(3);
  const Counts counts = test::random_counts(random, CountsKind::kEven, 4, 9);
  for (int i = 0; i < 60; ++i) {
    const BiasGradProblem p{.rows = counts.rows,
                            .n = i % 2 == 0 ? 5 : 64,
                            .experts = 4,
                            .dy = DType::kF32,
                            .dbias = DType::kF32,
                            .bias_scale = true,
                            .tail = Tail(i / 2 % 2)};
    Case got(p, counts, 1, 0);
    got.dy.fill(random, -2, 2);
    got.bias_scale.fill(random, 0, 1);
    for (int32_t& offset : got.offsets)
      offset = i % 3 == 0 ? int32_t(random()) >> (random() % 32)
                          : int32_t(random() % unsigned(counts.rows + 10)) - 5;
    Case want = got, fast = got;
    on_gpu(got);
    want.on_cpu("cpu_reference");
    fast.on_cpu("cpu");
    EXPECT_EQ(got.dbias_scale.bytes() == fast.dbias_scale.bytes(), true) << to_string(p);
    const std::vector<double> bound(size_t(p.experts * p.n), 1e-3);
    EXPECT_EQ(test::difference(got.dbias.values(), want.dbias.values(), bound, p.n), "");
  }
}

TEST_F(BiasGradOnDevice, OldContentDoesNotLeak) {
  const Counts counts{.rows = 4, .of = {0, 2, 0}};
  BiasGradProblem p{.rows = 4, .n = 8, .experts = 3};
  Case overwrite(p, counts, 1, 0);
  on_gpu(overwrite);
  for (int64_t n = 0; n < 8; ++n) {
    EXPECT_EQ(overwrite.dbias.at(0, n), 0);
    EXPECT_FALSE(std::isnan(overwrite.dbias.at(1, n)));
  }
  p.accumulate = Accumulate::kYes;
  Case add(p, counts, 1, 0);
  add.dbias.set({2, 1}, NAN);
  on_gpu(add);
  EXPECT_TRUE(std::isnan(add.dbias.at(2, 1)));
}

}  // namespace
}  // namespace cadre
