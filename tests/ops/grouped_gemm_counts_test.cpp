// Grouped GEMM over thousands of random counts, and over offsets that are broken.
#include <gtest/gtest.h>

#include "tests/ops/grouped_gemm_case.h"

using namespace cadre;
using test::Counts;
using test::GemmCase;

namespace {

GroupedGemmProblem problem(std::string_view words, const Counts& counts) {
  GroupedGemmProblem p = parse_grouped_gemm_problem(words);
  p.rows = counts.rows;
  p.experts = counts.experts();
  return p;
}

// Small matrices, all kinds of problems in turn. The tail of every operand is NaN.
TEST(GroupedGemmCounts, Random) {
  constexpr const char* kProblems[] = {
      "grouped_gemm fprop N=5 K=7 format=f32 out=f32",
      "grouped_gemm dgrad N=7 K=5 format=bf16 tail=zero",
      "grouped_gemm wgrad N=5 K=7 format=bf16 out=f32 accumulate=per_expert",
      "grouped_gemm fprop N=5 K=7 format=mxfp8 bias=yes bias_scale=yes tail=zero",
      "grouped_gemm dgrad N=7 K=5 format=fp8_block alpha=yes",
      "grouped_gemm wgrad N=5 K=7 format=nvfp4 discrete_out=yes",
      "grouped_gemm fprop N=5 K=7 format=fp8_tensor discrete_rhs=yes beta=yes",
      "grouped_gemm wgrad N=5 K=7 format=fp8_block",
      "grouped_gemm dgrad N=7 K=5 format=f32 lhs_major=column rhs_major=column out_major=column",
  };
  size_t draw = 0;
  test::for_random_counts(2240, 5, [&](const Counts& counts) {
    const char* words = kProblems[draw % std::size(kProblems)];
    GemmCase c(problem(words, counts), counts, unsigned(draw));
    for (std::string_view name : test::implementations(c.p)) {
      if (name == "cpu_reference" && draw % 8 != 0) continue;  // it has no cases
      EXPECT_EQ(c.check(name), "") << name << ": " << to_string(c.p) << " draw " << draw;
    }
    ++draw;
  });
}

// A row under a wrong expert changes a sum by about its size; rounding by far less.
void expect_about_equal(const GemmCase& c, const GemmCase::Result& fast,
                        const GemmCase::Result& slow) {
  double largest = 0;
  for (int64_t i = 0; i < elements(slow.view); ++i)
    largest = std::fmax(largest, std::abs(c.at(slow, i)));
  for (int64_t i = 0; i < elements(fast.view); ++i) {
    const double got = c.at(fast, i), want = c.at(slow, i);
    const bool same = std::isnan(want) ? std::isnan(got) : std::abs(got - want) <= 1e-5 * largest;
    ASSERT_TRUE(same) << "element " << i << ": got " << got << ", want " << want;
  }
}

// Offsets are the caller's and may be anything: nothing outside the buffers is touched, and every
// implementation agrees about whose rows are whose.
TEST(GroupedGemmCounts, BrokenOffsetsAreClamped) {
  const Counts counts{.rows = 40, .of = {10, 10, 10}};
  const std::vector<int32_t> kBroken[] = {
      {0, 10, 20, 41},
      {0, 30, 10, 40},
      {-5, 10, 20, 30},
      {0, 1 << 30, 20, 30},
      {50, 60, 70, 80},
      {0, 10, 20, -1},
      {INT32_MIN, 5, 5, INT32_MAX},
      {40, 30, 20, 10},
      {0, 10, 10, 2},
  };
  for (const char* words : {"grouped_gemm fprop N=5 K=7 format=f32 out=f32",
                            "grouped_gemm dgrad N=5 K=7 dy=fp8_block:2d w=fp8_block:2d out=f32",
                            "grouped_gemm dgrad N=5 K=7 format=bf16 out=f32 tail=zero",
                            "grouped_gemm wgrad N=5 K=7 format=fp8_block out=f32",
                            "grouped_gemm wgrad N=5 K=7 format=nvfp4 out=f32"}) {
    for (const std::vector<int32_t>& offsets : kBroken) {
      // All rows hold numbers, so that a row read under a wrong expert still shows.
      GemmCase c(problem(words, counts), counts, 1);
      c.fill_everything(2);
      c.offsets = offsets;
      const auto slow = c.run("cpu_reference");
      EXPECT_EQ(slow.damage, "") << words;
      for (std::string_view name : test::implementations(c.p)) {
        const auto fast = c.run(name);
        EXPECT_EQ(fast.damage, "") << name << ": " << words;
        expect_about_equal(c, fast, slow);
        if (testing::Test::HasFatalFailure()) FAIL() << name << ": " << words;
      }
    }
  }
}

}  // namespace
