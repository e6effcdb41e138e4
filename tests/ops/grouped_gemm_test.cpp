// Every implementation of grouped GEMM against sums in double: passes, formats, layouts, epilogues.
#include <gtest/gtest.h>

#include "tests/judge/formats.h"
#include "tests/ops/grouped_gemm_case.h"

using namespace cadre;
using test::Counts;
using test::GemmCase;

namespace {

Counts counts_with_gaps(int64_t tail) {
  Counts counts{.rows = 0, .of = {0, 7, 0, 33, 1, 18, 0}};
  counts.rows = counts.used() + tail;
  return counts;
}

GroupedGemmProblem problem(std::string_view words) {
  GroupedGemmProblem p = parse_grouped_gemm_problem(words);
  const Counts counts = counts_with_gaps(5);
  p.rows = counts.rows;
  p.experts = counts.experts();
  return p;
}

/// Runs the case on every implementation that takes it.
void expect_right(const GroupedGemmProblem& p, test::CaseLayout layout = {},
                  const Counts& counts = counts_with_gaps(5)) {
  for (std::string_view name : test::implementations(p)) {
    GemmCase c(p, counts, 1, layout);
    EXPECT_EQ(c.check(name), "") << name << ": " << to_string(p);
  }
}

TEST(GroupedGemm, EveryPairOfPlainFormatsAndOutputs) {
  for (const char* pass : {"fprop", "dgrad", "wgrad"}) {
    for (FormatKind lhs : {FormatKind::kF32, FormatKind::kBf16, FormatKind::kF16}) {
      for (FormatKind rhs : {FormatKind::kF32, FormatKind::kBf16, FormatKind::kF16}) {
        for (DType out : {DType::kF32, DType::kBf16, DType::kF16}) {
          GroupedGemmProblem p = problem(text("grouped_gemm ", pass, " N=37 K=45"));
          p.lhs = format(lhs), p.rhs = format(rhs), p.out = out;
          expect_right(p);
        }
      }
    }
  }
}

// Every format with every option, beside itself and beside bf16. The contraction is longer than the
// longest block.
TEST(GroupedGemm, EveryFormat) {
  const Counts counts{.rows = 150, .of = {3, 0, 141}};
  const auto scaled = [](const Format& f) { return !is_plain(f) && !f.hadamard; };
  for (const std::string& words : test::every_format(scaled)) {
    for (const char* shape : {"fprop N=35 K=141", "dgrad N=141 K=35", "wgrad N=35 K=45"}) {
      GroupedGemmProblem p =
          parse_grouped_gemm_problem(text("grouped_gemm ", shape, " R=150 E=3 out=f32"));
      p.lhs = p.rhs = parse_format(words);
      expect_right(p, {}, counts);
      p.lhs = format(FormatKind::kBf16);
      expect_right(p, {}, counts);
      std::swap(p.lhs, p.rhs);
      expect_right(p, {}, counts);
    }
  }
}

TEST(GroupedGemm, TransformedWgradContractsWholeBlocks) {
  for (const char* words : {"nvfp4:rht", "nvfp4:rht+sr", "nvfp4:2d+rht"}) {
    GroupedGemmProblem p = problem("grouped_gemm wgrad N=37 K=45 out=f32");
    p.lhs = p.rhs = parse_format(words);
    expect_right(p);
  }
}

TEST(GroupedGemm, EveryMajorOrderAndGap) {
  constexpr Major kMajors[] = {Major::kRow, Major::kColumn};
  for (const char* pass : {"fprop", "dgrad", "wgrad"})
    for (const char* format : {"f32", "bf16"})
      for (Major lhs : kMajors)
        for (Major rhs : kMajors)
          for (Major out : kMajors) {
            GroupedGemmProblem p =
                problem(text("grouped_gemm ", pass, " N=37 K=70 format=", format));
            p.lhs_major = lhs, p.rhs_major = rhs, p.out_major = out;
            expect_right(p);
            expect_right(p, {.lhs_gap = 3, .rhs_gap = 5, .out_gap = 7});
          }
}

TEST(GroupedGemm, StridedCodes) {
  for (const char* pass : {"fprop", "dgrad", "wgrad"})
    for (const char* format : {"fp8_block", "nvfp4", "mxfp8"})
      expect_right(problem(text("grouped_gemm ", pass, " N=37 K=45 format=", format)),
                   {.lhs_gap = 3, .rhs_gap = 5, .out_gap = 7});
}

// Codes of w with the contraction of dgrad innermost, and scales down their columns.
TEST(GroupedGemm, ColumnMajorCodesAndScales) {
  for (const char* format : {"fp8_tensor", "fp8_block", "mxfp8", "nvfp4", "mxfp4"})
    for (const char* discrete : {"no", "yes"}) {
      GroupedGemmProblem p = problem(text("grouped_gemm dgrad N=137 K=45 format=", format,
                                          " discrete_rhs=", discrete, " rhs_major=column"));
      const auto expect_by_reference = [&] {
        EXPECT_EQ(test::implementations(p), std::vector<std::string_view>{"cpu_reference"});
        expect_right(p, {.lhs_gap = 3, .rhs_gap = 5, .out_gap = 7});
      };
      expect_by_reference();
      if (info(p.rhs.kind).block == 0) continue;
      p.rhs_scales_major = Major::kColumn;
      expect_by_reference();
      p.rhs_major = Major::kRow;
      expect_by_reference();
      p.pass = Pass::kFprop;
      expect_by_reference();
    }
  for (const char* pass : {"fprop", "dgrad"})
    for (const char* format : {"fp8_block", "mxfp8", "nvfp4"})
      expect_right(problem(text("grouped_gemm ", pass,
                                " N=137 K=145 lhs_scales_major=column format=", format)),
                   {.lhs_gap = 3, .rhs_gap = 5, .out_gap = 7});
}

// Contractions and experts beyond every tile, panel and chunk, and no multiple of any.
TEST(GroupedGemm, LargerThanAnyTile) {
  const Counts counts{.rows = 620, .of = {1, 0, 401, 130, 2, 33}};
  for (const char* format : {"f32", "bf16", "fp8_tensor"})
    for (const char* words :
         {"fprop N=70 K=1100", "dgrad N=1100 K=70 out=f32", "fprop N=1100 K=20 bias=yes",
          "dgrad N=20 K=1100", "dgrad N=900 K=37 rhs_major=column out=f32",
          "wgrad N=150 K=530 out=f32", "wgrad N=140 K=530 out=f32 accumulate=yes",
          "wgrad N=37 K=70 out=bf16 accumulate=yes"}) {
      GroupedGemmProblem p =
          parse_grouped_gemm_problem(text("grouped_gemm ", words, " format=", format));
      p.rows = counts.rows, p.experts = counts.experts();
      if (p.rhs_major == Major::kColumn && !is_plain(p.rhs)) continue;  // no such layout
      for (std::string_view name : test::implementations(p)) {
        if (name == "cpu_reference") continue;  // slow, and without tiles
        GemmCase c(p, counts, 1, {.lhs_gap = 16, .rhs_gap = 8, .out_gap = 4});
        EXPECT_EQ(c.check(name), "") << name << ": " << to_string(p);
      }
    }
}

TEST(GroupedGemm, DiscreteExperts) {
  for (const char* format : {"f32", "bf16", "mxfp8", "nvfp4", "fp8_tensor"}) {
    for (const char* pass : {"fprop", "dgrad"})
      expect_right(
          problem(text("grouped_gemm ", pass, " N=37 K=45 discrete_rhs=yes format=", format)));
    expect_right(problem(text("grouped_gemm wgrad N=37 K=45 discrete_out=yes format=", format)));
  }
}

TEST(GroupedGemm, EpilogueOfRows) {
  for (const char* out : {"f32", "bf16", "f16"})
    for (const char* major : {"row", "column"})
      for (const char* words :
           {"alpha=yes", "beta=yes", "alpha=yes beta=yes", "bias=yes", "bias=yes bias_dtype=f32",
            "bias=yes bias_scale=yes bias_dtype=f16", "bias=yes discrete_bias=yes",
            "alpha=yes beta=yes bias=yes bias_scale=yes discrete_bias=yes tail=zero"})
        expect_right(problem(
            text("grouped_gemm fprop N=37 K=45 out=", out, " out_major=", major, " ", words)));
  for (const char* words : {"alpha=yes", "beta=yes", "alpha=yes beta=yes tail=zero"})
    expect_right(problem(text("grouped_gemm dgrad N=37 K=45 format=f32 out=f32 ", words)));
}

TEST(GroupedGemm, TheAddendMayBeTheOutput) {
  const auto p = problem("grouped_gemm fprop N=37 K=45 format=f32 out=f32 beta=yes");
  for (std::string_view name : test::implementations(p)) {
    GemmCase c(p, counts_with_gaps(5), 1);
    c.c_is_out = true;
    EXPECT_EQ(c.check(name), "") << name;
  }
}

TEST(GroupedGemm, AnAddendTimesZeroIsNotRead) {
  const auto p = problem("grouped_gemm fprop N=37 K=45 out=f32 beta=yes");
  for (std::string_view name : test::implementations(p)) {
    GemmCase c(p, counts_with_gaps(5), 1);
    c.beta.assign(c.beta.size(), 0.0f);
    c.poison_addend();
    EXPECT_EQ(c.check(name), "") << name;
  }
}

// Old content is NaN wherever it must not be read.
TEST(GroupedGemm, AccumulateOverwritesAddsOrAsksTheDevice) {
  for (const char* out : {"f32", "bf16", "f16"})
    for (const char* words :
         {"accumulate=no", "accumulate=yes", "accumulate=yes alpha=yes", "accumulate=device",
          "accumulate=per_expert", "accumulate=per_expert discrete_out=yes out_major=column"})
      for (unsigned seed : {1u, 2u, 3u}) {
        const auto p = problem(text("grouped_gemm wgrad N=37 K=45 out=", out, " ", words));
        for (std::string_view name : test::implementations(p)) {
          GemmCase c(p, counts_with_gaps(5), seed);
          EXPECT_EQ(c.check(name), "") << name << ": " << to_string(c.p);
        }
      }
}

// A NaN or an infinity shows where it belongs, and nowhere else.
TEST(GroupedGemm, SpecialValuesStayInTheirRowAndExpert) {
  for (const char* words :
       {"fprop N=37 K=45 format=f32", "fprop N=37 K=45 format=bf16", "dgrad N=37 K=45 format=f32",
        "wgrad N=37 K=45 format=bf16", "fprop N=37 K=45 format=f32 rhs_major=column"}) {
    const auto p = problem(text("grouped_gemm ", words));
    for (std::string_view name : test::implementations(p)) {
      GemmCase c(p, counts_with_gaps(5), 1);
      c.lhs().plant(0, 9, 5, std::nan(""));
      c.lhs().plant(0, 58, 36, INFINITY);
      const bool wgrad = c.p.pass == Pass::kWgrad;
      wgrad ? c.rhs().plant(0, 40, 44, std::nan("")) : c.rhs().plant(4, 36, 44, std::nan(""));
      EXPECT_EQ(c.check(name), "") << name << ": " << to_string(c.p);
    }
  }
}

TEST(GroupedGemm, RunsWhatWasChecked) {
  GemmCase c(problem("grouped_gemm fprop N=37 K=45"), counts_with_gaps(5), 1);
  const GroupedGemmPlan chosen = plan(c.p, this_cpu());
  const auto result =
      c.run_by(chosen.workspace_bytes, [&](const GroupedGemmArgs& args, Workspace workspace) {
        check(chosen, args);
        run_checked(chosen, args, workspace, {});
        EXPECT_THROW(run_checked({}, args, workspace, {}), InvalidArgument);
      });
  EXPECT_EQ(c.check(result), "");
}

TEST(GroupedGemm, TailsAreKeptOrZero) {
  for (const char* pass : {"fprop", "dgrad"})
    for (const char* tail : {"keep", "zero"})
      for (const char* major : {"row", "column"})
        expect_right(
            problem(text("grouped_gemm ", pass, " N=37 K=45 tail=", tail, " out_major=", major)));
}

}  // namespace
