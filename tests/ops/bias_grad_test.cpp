#include "cadre/bias_grad.h"

#include <gtest/gtest.h>

#include "tests/judge/close.h"
#include "tests/judge/errors.h"
#include "tests/judge/threads.h"
#include "tests/ops/bias_grad_case.h"

using namespace cadre;
using test::Counts;
using test::CountsKind;
using test::gamma;
using test::rounding;
using test::Tensor;
using Case = test::BiasGradCase;

namespace {

/// dbias by hand, and its bound: a product and a sum for each row, and what was there.
void check_dbias(const Case& got, const Case& before) {
  const BiasGradProblem& p = got.p;
  for (int e = 0; e < p.experts; ++e) {
    const int64_t first = got.offsets[size_t(e)], last = got.offsets[size_t(e) + 1];
    for (int64_t n = 0; n < p.n; ++n) {
      const int64_t at = before.row_of_expert(e);
      double want = before.adds(e) ? before.dbias.at(at, n) : 0, magnitude = std::abs(want);
      for (int64_t r = first; r < last; ++r) {
        const double term = before.dy.at(r, n) * (p.bias_scale ? before.bias_scale.at(r) : 1);
        want += term;
        magnitude += std::abs(term);
      }
      const double bound =
          first == last ? 0 : gamma(last - first + 2, magnitude) + rounding(p.dbias, want) * 1.001;
      EXPECT_NEAR(got.dbias.at(at, n), want, bound) << to_string(p) << " e=" << e << " n=" << n;
    }
  }
}

void check_dbias_scale(const Case& got, const Case& before) {
  const BiasGradProblem& p = got.p;
  for (int e = 0; e < p.experts; ++e)
    for (int64_t r = got.offsets[size_t(e)]; r < got.offsets[size_t(e) + 1]; ++r) {
      double want = 0, magnitude = 0;
      for (int64_t n = 0; n < p.n; ++n) {
        const double term = before.dy.at(r, n) * before.bias.at(before.row_of_expert(e), n);
        want += term;
        magnitude += std::abs(term);
      }
      EXPECT_NEAR(got.dbias_scale.at(r), want, gamma(p.n + 1, magnitude)) << to_string(p);
    }
  for (int64_t r = got.used(); r < p.rows; ++r)
    EXPECT_TRUE(p.tail == Tail::kZero ? got.dbias_scale.at(r) == 0
                                      : std::isnan(got.dbias_scale.at(r)));
}

struct EveryImplementation : testing::TestWithParam<const char*> {};

TEST_P(EveryImplementation, IsItsFormulaWithinTheBound) {
  constexpr DType kTypes[] = {DType::kF32, DType::kBf16, DType::kF16};
  unsigned seed = 0;
  test::for_random_counts(420, 7, [&](const Counts& counts) {
    ++seed;
    if (counts.experts() > 64 && seed % 8 != 0) return;
    const BiasGradProblem p{.rows = counts.rows,
                            .n = std::array<int64_t, 4>{1, 7, 128, 150}[seed / 3 % 4],
                            .experts = counts.experts(),
                            .dy = kTypes[seed % 3],
                            .dbias = kTypes[seed / 3 % 3],
                            .discrete = seed % 2 == 0,
                            .bias_scale = seed % 5 < 3,
                            .bias = kTypes[seed / 9 % 3],
                            .accumulate = Accumulate(seed / 2 % 4),
                            .tail = Tail(seed / 4 % 2)};
    const Case before(p, counts, seed);
    Case got(p, counts, seed);
    got.on_cpu(GetParam());
    check_dbias(got, before);
    if (p.bias_scale) check_dbias_scale(got, before);
  });
}

TEST_P(EveryImplementation, BrokenOffsetsStayInside) {
  std::mt19937 random(3);
  const Counts counts = test::random_counts(random, CountsKind::kEven, 4, 3);
  for (int i = 0; i < 50; ++i) {
    Case c({.rows = counts.rows, .n = 5, .experts = 4, .bias_scale = true, .tail = Tail::kZero},
           counts, 1);
    for (int32_t& offset : c.offsets) offset = int32_t(random()) >> (random() % 32);
    c.on_cpu(GetParam());  // sees its canaries
  }
}

TEST_P(EveryImplementation, EmptyExpertsAreZeroOrUntouched) {
  const Counts counts{.rows = 4, .of = {0, 2, 0}};
  BiasGradProblem p{.rows = 4, .n = 3, .experts = 3};
  Case overwrite(p, counts, 1);
  overwrite.on_cpu(GetParam());
  p.accumulate = Accumulate::kYes;
  Case add(p, counts, 1);
  add.dbias.set({2, 1}, NAN);
  add.on_cpu(GetParam());
  for (int64_t n = 0; n < 3; ++n) EXPECT_EQ(overwrite.dbias.at(0, n), 0);
  EXPECT_TRUE(std::isnan(add.dbias.at(2, 1)));
}

INSTANTIATE_TEST_SUITE_P(BiasGrad, EveryImplementation, testing::Values("cpu", "cpu_reference"));

TEST(BiasGrad, DoesNotDependOnTheThreads) {
  std::mt19937 random(3);
  const Counts counts = test::random_counts(random, CountsKind::kSkewed, 9, 8);
  const BiasGradProblem p{
      .rows = counts.rows, .n = 300, .experts = 9, .dbias = DType::kF32, .bias_scale = true};
  Case want(p, counts, 4);
  {
    const test::Threads one(1);
    want.on_cpu("cpu");
  }
  for (int threads : {2, 3, 5}) {
    const test::Threads set(threads);
    Case got(p, counts, 4);
    got.on_cpu("cpu");
    EXPECT_EQ(got.dbias.bytes(), want.dbias.bytes());
    EXPECT_EQ(got.dbias_scale.bytes(), want.dbias_scale.bytes());
  }
}

// The loss sum(dy * (bias * scale)) is linear in both, so a difference is its gradient.
TEST(BiasGrad, IsTheLimitOfDifferences) {
  const Counts counts{.rows = 6, .of = {2, 0, 3}};
  const BiasGradProblem p{.rows = 6,
                          .n = 4,
                          .experts = 3,
                          .dy = DType::kF32,
                          .dbias = DType::kF32,
                          .bias_scale = true,
                          .bias = DType::kF32};
  Case c(p, counts, 2);
  c.on_cpu("cpu");
  const auto loss = [&](const Tensor& bias, const Tensor& scale) {
    double sum = 0;
    for (int e = 0; e < 3; ++e)
      for (int64_t r = c.offsets[size_t(e)]; r < c.offsets[size_t(e) + 1]; ++r)
        for (int64_t n = 0; n < p.n; ++n) sum += c.dy.at(r, n) * bias.at(e, n) * scale.at(r);
    return sum;
  };
  for (int64_t e = 0; e < 3; ++e)
    for (int64_t n = 0; n < p.n; ++n) {
      Tensor above = c.bias;
      above.set({e, n}, c.bias.at(e, n) + 1);
      EXPECT_NEAR(c.dbias.at(e, n), loss(above, c.bias_scale) - loss(c.bias, c.bias_scale), 1e-5);
    }
  for (int64_t r = 0; r < c.used(); ++r) {
    Tensor above = c.bias_scale;
    above.set({r}, c.bias_scale.at(r) + 1);
    EXPECT_NEAR(c.dbias_scale.at(r), loss(c.bias, above) - loss(c.bias, c.bias_scale), 1e-5);
  }
}

TEST(BiasGradProblem, PrintsAndParsesBack) {
  BiasGradProblem p{.rows = 8192, .n = 2048, .experts = 64};
  EXPECT_EQ(to_string(p), "bias_grad R=8192 N=2048 E=64 dy=bf16 dbias=bf16");
  EXPECT_EQ(parse_bias_grad_problem(to_string(p)), p);
  p = {.rows = 1,
       .n = 2,
       .experts = 3,
       .dy = DType::kF16,
       .dbias = DType::kF32,
       .discrete = true,
       .bias_scale = true,
       .bias = DType::kF32,
       .accumulate = Accumulate::kDevice,
       .tail = Tail::kZero};
  EXPECT_EQ(to_string(p),
            "bias_grad R=1 N=2 E=3 dy=f16 dbias=f32 discrete=yes bias_scale=yes bias=f32 "
            "accumulate=device tail=zero");
  EXPECT_EQ(parse_bias_grad_problem(to_string(p)), p);
}

std::string head(const std::string& message) { return message.substr(0, message.rfind(" [")); }

std::string plan_error(std::string_view words) {
  return head(test::invalid([&] { plan(parse_bias_grad_problem(words), this_cpu()); }));
}

TEST(BiasGradErrors, OfProblems) {
  EXPECT_EQ(plan_error("bias_grad N=0"), "bias_grad: N is 0, must be 1 or more");
  EXPECT_EQ(plan_error("bias_grad N=1 E=0"), "bias_grad: E is 0, must be 1 or more");
  EXPECT_EQ(plan_error("bias_grad N=1 R=2147483648"),
            "bias_grad: R is 2147483648, must be below 2^31; rows are numbered in int32");
  EXPECT_EQ(plan_error("bias_grad N=1 dy=e5m2"), "bias_grad: dy is e5m2, must be f32, bf16 or f16");
  EXPECT_EQ(plan_error("bias_grad N=1 dbias=e5m2"),
            "bias_grad: dbias is e5m2, must be f32, bf16 or f16");
  EXPECT_EQ(plan_error("bias_grad N=1 bias=e5m2"),
            "bias_grad: bias is e5m2, must be f32, bf16 or f16");
  EXPECT_EQ(head(test::invalid([] { plan(BiasGradProblem{.rows = -1, .n = 1}, this_cpu()); })),
            "bias_grad: R is -1, must be 0 or more");
}

/// The error of running a small problem after `spoil` changed it or its arguments.
template <class Spoil>
std::string error(BiasGradProblem p, Spoil&& spoil) {
  p.rows = 4, p.n = 3, p.experts = 2;
  Case c(p, {.rows = 4, .of = {1, 2}}, 1);
  BiasGradArgs args = c.args();
  spoil(args, c);
  return head(test::invalid([&] { run(plan(p, this_cpu()), args, {}, {}); }));
}

TEST(BiasGradErrors, OfTensors) {
  EXPECT_EQ(error({}, [](BiasGradArgs& a, Case& c) { a.dy = c.dbias.view(); }),
            "bias_grad: dy is bf16[2, 3] strides (8, 1), must be bf16[4, 3]");
  EXPECT_EQ(error({}, [](BiasGradArgs& a, Case& c) { a.dbias = c.dy.view(); }),
            "bias_grad: dbias is bf16[4, 3] strides (6, 1), must be bf16[2, 3]");
  EXPECT_EQ(error({.discrete = true}, [](BiasGradArgs& a, Case& c) { a.dbias = c.dbias.view(); }),
            "bias_grad: dbias is given, must be null; the problem says discrete=yes; give E "
            "pointers");
  EXPECT_EQ(error({.discrete = true}, [](BiasGradArgs& a, Case&) { a.discrete_dbias = nullptr; }),
            "bias_grad: discrete_dbias is null, must point to 2 elements; the problem says "
            "discrete=yes");
  EXPECT_EQ(error({}, [](BiasGradArgs& a, Case& c) { a.discrete_dbias = c.dbias_pointers.data(); }),
            "bias_grad: discrete_dbias is given, must be null; the problem says discrete=no; give "
            "one tensor");
  EXPECT_EQ(error({}, [](BiasGradArgs& a, Case&) { a.offsets.experts = 3; }),
            "bias_grad: offsets.experts is 3, must be 2; the experts of the problem");
}

TEST(BiasGradErrors, OfScales) {
  const BiasGradProblem scaled{.bias_scale = true};
  EXPECT_EQ(error(scaled, [](BiasGradArgs& a, Case&) { a.bias_scale = nullptr; }),
            "bias_grad: bias_scale is null, must point to 4 elements; the problem says "
            "bias_scale=yes");
  EXPECT_EQ(error(scaled, [](BiasGradArgs& a, Case&) { a.dbias_scale = nullptr; }),
            "bias_grad: dbias_scale is null, must point to 4 elements; the problem says "
            "bias_scale=yes");
  EXPECT_EQ(error(scaled, [](BiasGradArgs& a, Case& c) { a.bias = c.dy.view(); }),
            "bias_grad: bias is bf16[4, 3] strides (6, 1), must be bf16[2, 3]");
  EXPECT_EQ(
      error(scaled, [](BiasGradArgs& a, Case& c) { a.discrete_bias = c.bias_pointers.data(); }),
      "bias_grad: discrete_bias is given, must be null; the problem says discrete=no; give "
      "one tensor");
  const std::string unused = " is given, must be null; the problem says bias_scale=no";
  EXPECT_EQ(error({}, [](BiasGradArgs& a, Case& c) { a.bias_scale = c.bias_scale.data<float>(); }),
            "bias_grad: bias_scale" + unused);
  EXPECT_EQ(
      error({}, [](BiasGradArgs& a, Case& c) { a.dbias_scale = c.dbias_scale.data<float>(); }),
      "bias_grad: dbias_scale" + unused);
  EXPECT_EQ(error({}, [](BiasGradArgs& a, Case& c) { a.bias = c.bias.view(); }),
            "bias_grad: bias" + unused);
  EXPECT_EQ(error({}, [](BiasGradArgs& a, Case& c) { a.discrete_bias = c.bias_pointers.data(); }),
            "bias_grad: discrete_bias" + unused);
}

TEST(BiasGradErrors, OfAccumulate) {
  EXPECT_EQ(error({.accumulate = Accumulate::kDevice},
                  [](BiasGradArgs& a, Case&) { a.accumulate = nullptr; }),
            "bias_grad: accumulate is null, must point to 1 element; the problem says "
            "accumulate=device");
  EXPECT_EQ(error({}, [](BiasGradArgs& a, Case& c) { a.accumulate = c.words.data(); }),
            "bias_grad: accumulate is given, must be null; only accumulate=device and "
            "accumulate=per_expert read it");
  EXPECT_EQ(error({.accumulate = Accumulate::kPerExpert},
                  [](BiasGradArgs& a, Case&) { a.accumulate = nullptr; }),
            "bias_grad: accumulate is null, must point to 2 elements; the problem says "
            "accumulate=per_expert");
}

}  // namespace
