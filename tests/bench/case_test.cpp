// The random cases of `cadre check` and `cadre bench`: what they hold, and that they can fail.
#include "bench/case.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "bench/check.h"
#include "bench/compare.h"
#include "bench/element.h"
#include "bench/measure.h"
#include "bench/visit.h"
#include "cadre/error.h"
#include "tests/bench/problems.h"

using namespace cadre;
using bench::Draw;
using test::kProblems;

namespace {

bool is_nan(const TensorView& v, int64_t offset) { return std::isnan(bench::load(v, offset)); }

}  // namespace

TEST(Case, TailsOfInputsAreNaNAndLiveRowsAreNot) {
  const auto c = bench::make_case(parse_activation_problem("activation backward gelu R=64 F=9 E=4"),
                                  Draw{.live = 0.75});
  ASSERT_EQ(c.offsets.back(), 48);
  for (const TensorView& v : {c.args.z, c.args.dh})
    for (int64_t i = 0; i < elements(v); ++i)
      EXPECT_EQ(is_nan(v, bench::offset_of(v, i)), i / 9 >= 48) << i;
}

TEST(Case, OutputsArePoisonedBeforeTheRun) {
  const auto c =
      bench::make_case(parse_grouped_gemm_problem("grouped_gemm fprop R=8 N=9 K=7 E=2"), Draw());
  const auto before = bench::snapshot(c.outputs[0]);
  EXPECT_TRUE(
      std::all_of(before.begin(), before.end(), [](std::byte b) { return b == std::byte{0xff}; }));
}

TEST(Case, EqualDrawsGiveEqualBitsAndOthersDoNot) {
  const auto problem = parse_grouped_gemm_problem("grouped_gemm dgrad R=64 N=24 K=40 E=4");
  const auto bits = [&](uint64_t seed) {
    const auto c = bench::make_case(problem, Draw{.seed = seed});
    return bench::snapshot({"w", c.args.rhs.codes, c.args.rhs.codes[0]});
  };
  EXPECT_EQ(bits(3), bits(3));
  EXPECT_NE(bits(3), bits(4));
}

TEST(Case, RowGapsSpreadTheRows) {
  const auto problem = parse_grouped_gemm_problem(
      "grouped_gemm fprop R=64 N=24 K=40 E=4 rhs_major=column out_major=column");
  const auto c = bench::make_case(problem, Draw{.row_gap = 5});
  EXPECT_EQ(c.args.lhs.codes.stride[0], 45);
  EXPECT_EQ(c.args.rhs.codes.stride[1], 1);
  EXPECT_EQ(c.args.rhs.codes.stride[2], 29);
  EXPECT_EQ(c.args.out.stride[1], 69);
}

TEST(Case, DiscreteExpertsAreWhereTheirPointersSay) {
  const auto problem = parse_grouped_gemm_problem(
      "grouped_gemm fprop R=8 N=6 K=32 E=3 format=mxfp8 discrete_rhs=yes");
  const auto c = bench::make_case(problem, Draw());
  EXPECT_EQ(c.args.rhs.codes.data, nullptr);
  EXPECT_EQ(static_cast<const char*>(c.args.rhs.discrete[2]) -
                static_cast<const char*>(c.args.rhs.discrete[0]),
            2 * 6 * 32);
  EXPECT_EQ(static_cast<const char*>(c.args.rhs.discrete_scales[2]) -
                static_cast<const char*>(c.args.rhs.discrete_scales[0]),
            2 * 6);
}

TEST(Case, TheProblemsOfTheseTestsAreOfEveryOperation) {
  for (const OperationInfo& operation : operation_list())
    EXPECT_TRUE(std::any_of(
        std::begin(kProblems), std::end(kProblems),
        [&](const char* problem) { return bench::operation_of(problem) == operation.name; }))
        << operation.name << " is missing in tests/bench/problems.h";
}

TEST(Check, IsGoodForEveryOperationAndNamesItsPlan) {
  for (const char* problem : kProblems)
    for (const char* offsets : {"uniform", "zipf:1.5", "onehot"}) {
      const bench::CheckReport r =
          bench::check(problem, {.seed = 5, .offsets = offsets, .live = 0.9});
      EXPECT_TRUE(r.good()) << r.fault << " [" << problem << "]";
      EXPECT_LE(r.error_of_bound, 1);
      EXPECT_FALSE(r.is_reference()) << problem;
    }
}

TEST(Check, UnknownOperationsListTheKnown) {
  try {
    bench::check("grouped_mlp R=1", {});
    FAIL();
  } catch (const InvalidArgument& e) {
    const std::string what = e.what();
    EXPECT_TRUE(
        what.starts_with("problem: operation is 'grouped_mlp', must be one of activation, "))
        << what;
    EXPECT_TRUE(what.ends_with("; layers are rows of these")) << what;
    for (const OperationInfo& operation : operation_list())
      EXPECT_NE(what.find(operation.name), what.npos) << operation.name;
  }
}

TEST(Magnitudes, BoundTheTermsOfEveryElement) {
  const auto problem = parse_grouped_gemm_problem("grouped_gemm fprop R=8 N=2 K=3 E=1 format=f32");
  const auto c = bench::make_case(problem, Draw());
  const bench::Magnitude m = bench::magnitudes(c)[0];
  EXPECT_EQ(m.roundings, 3 + 8);
  for (int64_t r = 0; r < 8; ++r)
    for (int64_t n = 0; n < 2; ++n) {
      double size = 0;
      for (int64_t k = 0; k < 3; ++k)
        size += std::abs(double(bench::load(c.args.lhs.codes, r * 3 + k)) *
                         bench::load(c.args.rhs.codes, n * 3 + k));
      EXPECT_NEAR(m.sizes[size_t(r * 2 + n)], size, 1e-6 * size);
    }
}

TEST(Shrink, LowersRowsAndNothingElse) {
  auto gemm = parse_grouped_gemm_problem("grouped_gemm wgrad R=100000 N=2048 K=4096 E=64");
  const auto before = gemm;
  EXPECT_EQ(bench::shrink(gemm), gemm.rows);
  EXPECT_GE(gemm.rows, 1);
  EXPECT_LT(gemm.rows, 100);
  gemm.rows = before.rows;
  EXPECT_EQ(gemm, before);
  auto small = parse_quantize_problem("quantize weights N=128 K=64 E=2 along_k=mxfp8 role=w");
  EXPECT_EQ(bench::shrink(small), 128);
}

TEST(Measure, TimesOursFirstAndChecksBeforehand) {
  for (const char* problem : kProblems) {
    const bench::Measurement m = bench::measure(problem, {.contest = {.repeat = 3}});
    EXPECT_TRUE(m.check.good()) << m.check.fault;
    // A build without oneDNN has no peer of grouped_gemm; cli_test.py looks at its name.
    const bool gemm = std::string_view(problem).starts_with("grouped_gemm");
    ASSERT_GE(m.timings.size(), gemm ? 1u : 2u) << problem;
    EXPECT_EQ(m.timings[0].name, "cadre");
    EXPECT_EQ(m.timings[0].speed, 1);
    for (const bench::Timing& t : m.timings) {
      EXPECT_GT(t.us.median, 0);
      EXPECT_GT(t.speed, 0);
    }
    EXPECT_GT(m.bytes, 0);
  }
}
