// The text of grouped GEMMs, and every message of their checks.
#include <gtest/gtest.h>

#include "cadre/recipe.h"
#include "tests/judge/errors.h"
#include "tests/ops/grouped_gemm_case.h"

using namespace cadre;

namespace {

GroupedGemmProblem parsed(std::string_view words) { return parse_grouped_gemm_problem(words); }

TEST(GroupedGemmText, IsThatOfTheHeader) {
  GroupedGemmProblem p;
  p.rows = 8192, p.n = 2048, p.k = 4096, p.experts = 64;
  EXPECT_EQ(to_string(p), "grouped_gemm fprop R=8192 N=2048 K=4096 E=64 format=bf16");
  p.pass = Pass::kWgrad;
  p.lhs = parse_format("nvfp4:rht+sr"), p.rhs = parse_format("nvfp4:rht");
  EXPECT_EQ(to_string(p), "grouped_gemm wgrad R=8192 N=2048 K=4096 E=64 format=nvfp4");
  p.rhs = parse_format("bf16");
  EXPECT_EQ(to_string(p), "grouped_gemm wgrad R=8192 N=2048 K=4096 E=64 dy=nvfp4:rht+sr x=bf16");
}

TEST(GroupedGemmText, ParsesBack) {
  for (const char* words :
       {"grouped_gemm fprop R=0 N=1 K=1 E=1 format=bf16",
        "grouped_gemm dgrad R=1 N=2 K=3 E=4 dy=f32 w=mxfp4 out=f16 beta=yes tail=zero",
        "grouped_gemm fprop R=1 N=2 K=3 E=4 x=bf16 w=mxfp8:2d+floor out=f32 rhs_major=column",
        "grouped_gemm fprop R=1 N=2 K=3 E=4 format=f32 lhs_major=column out_major=column "
        "discrete_rhs=yes alpha=yes bias=yes discrete_bias=yes bias_scale=yes bias_dtype=f32 "
        "unit_budget=3 align=4",
        "grouped_gemm wgrad R=1 N=2 K=3 E=4 format=mxfp8 discrete_out=yes accumulate=per_expert",
        "grouped_gemm dgrad R=1 N=2 K=3 E=4 format=fp8_block rhs_major=column "
        "lhs_scales_major=column rhs_scales_major=column",
        "grouped_gemm fprop R=9 N=64 K=3 E=4 format=bf16 gather=lhs T=3 top_k=8 act=swiglu",
        "grouped_gemm wgrad R=9 N=64 K=3 E=4 format=f16 gather=rhs T=3",
        "grouped_gemm fprop R=1 N=64 K=3 E=4 format=bf16 act=swiglu layout=interleave32 prob=yes "
        "z=yes",
        "grouped_gemm fprop R=1 N=2 K=3 E=4 format=f16 act=clamped_swiglu limit=3 act_alpha=2 "
        "offset=0.5"})
    EXPECT_EQ(to_string(parsed(words)), words);
}

TEST(GroupedGemmText, EveryRecipeHasItsName) {
  for (const RecipeInfo& row : recipe_list())
    for (const char* pass : {"fprop", "dgrad", "wgrad"}) {
      const GroupedGemmProblem p =
          parsed(text("grouped_gemm ", pass, " R=1 N=2 K=3 E=4 format=", row.name));
      EXPECT_EQ(p.lhs, formats_of(row.recipe, p.pass).lhs) << row.name;
      EXPECT_EQ(p.rhs, formats_of(row.recipe, p.pass).rhs) << row.name;
      EXPECT_EQ(parsed(to_string(p)), p) << row.name;
    }
}

TEST(GroupedGemmText, OneFormatOrTwoOperands) {
  EXPECT_EQ(test::invalid([] { parsed("grouped_gemm dgrad format=bf16 w=f32"); }),
            "problem: format and w are both given, must be one or the other [grouped_gemm]");
  EXPECT_EQ(test::invalid([] { parsed("grouped_gemm fprop dy=f32"); }).substr(0, 41),
            "problem: name is 'dy', must be one of R, ");
}

// What plan() says of a problem, without the problem at the end.
std::string refusal(std::string_view words) {
  const std::string said = test::invalid([&] { plan(parsed(words), this_cpu()); });
  return said.substr(0, said.find(" [grouped_gemm"));
}

TEST(GroupedGemmChecks, Problems) {
  const struct {
    const char *words, *said;
  } kRows[] = {
      {"fprop R=2147483648 N=1 K=1",
       "R is 2147483648, must be below 2^31; rows are numbered in int32"},
      {"fprop N=0 K=1", "N is 0, must be 1 or more"},
      {"fprop N=1 K=0", "K is 0, must be 1 or more"},
      {"fprop N=1 K=1 E=0", "E is 0, must be 1 or more"},
      {"fprop N=1 K=1 align=0", "align is 0, must be a power of two; it counts bytes"},
      {"fprop N=1 K=1 align=12", "align is 12, must be a power of two; it counts bytes"},
      {"fprop N=1 K=1 out=e4m3", "out is e4m3, must be f32, bf16 or f16"},
      {"fprop N=1 K=1 bias_dtype=i32", "bias_dtype is i32, must be f32, bf16 or f16"},
      {"wgrad N=1 K=1 discrete_rhs=yes", "discrete_rhs is yes, must be no; wgrad reads no weight"},
      {"fprop N=1 K=1 discrete_out=yes",
       "discrete_out is yes, must be no; only wgrad writes one output per expert"},
      {"dgrad N=1 K=1 discrete_out=yes",
       "discrete_out is yes, must be no; only wgrad writes one output per expert"},
      {"wgrad N=1 K=1 beta=yes", "beta is yes, must be no; wgrad has accumulate"},
      {"dgrad N=1 K=1 bias=yes", "bias is yes, must be no; only fprop adds a bias"},
      {"fprop N=1 K=1 discrete_bias=yes", "discrete_bias is yes, must be no; there is no bias"},
      {"fprop N=1 K=1 bias_scale=yes", "bias_scale is yes, must be no; there is no bias"},
      {"fprop N=1 K=1 accumulate=device",
       "accumulate is device, must be no; only wgrad accumulates, use beta"},
      {"wgrad N=1 K=1 tail=zero", "tail is zero, must be keep; dw has no rows of a tail"},
      {"wgrad N=1 K=1 dy=nvfp4:rht x=nvfp4",
       "rht is yes for dy and no for x, must be the same; transforms cancel only in pairs"},
      {"fprop N=1 K=2 x=nvfp4:rht w=nvfp4",
       "rht is yes, must be no; only wgrad's operands are transformed"},
      {"dgrad N=2 K=1 act=swiglu", "act is swiglu, must be absent; only fprop has one"},
      {"fprop N=2 K=1 act=swiglu out_major=column",
       "out_major is column, must be row; act is swiglu"},
      {"fprop N=3 K=1 act=geglu", "N is 3, must be even; gate and up of every feature"},
      {"fprop N=3 K=1 act=relu layout=interleave1",
       "layout is interleave1, must be concat; an ungated activation has one input"},
      {"fprop N=80 K=1 act=geglu layout=interleave32",
       "F is 40, must be a multiple of 32; layout interleave32 comes in blocks of 32"},
      {"fprop N=2 K=1 act=clamped_swiglu limit=0", "limit is 0, must be above 0 and finite"},
  };
  for (const auto& row : kRows)
    EXPECT_EQ(refusal(text("grouped_gemm ", row.words)), text("grouped_gemm: ", row.said));
}

TEST(GroupedGemmChecks, Dense) {
  const struct {
    const char *words, *why;
  } kRows[] = {
      {"dgrad N=1 K=1", "only fprop is dense"},
      {"fprop N=1 K=1 E=2", "only one expert can have all rows"},
      {"fprop N=1 K=1 gather=lhs T=1", "its rows are neither gathered nor scattered"},
      {"fprop N=1 K=1 scatter=yes", "its rows are neither gathered nor scattered"},
      {"fprop N=1 K=1 act=relu", "it computes no activation"},
  };
  for (const auto& row : kRows)
    EXPECT_EQ(refusal(text("grouped_gemm ", row.words, " dense=yes")),
              text("grouped_gemm: dense is yes, must be no; ", row.why));
}

TEST(GroupedGemmChecks, Gather) {
  const struct {
    const char *words, *said;
  } kRows[] = {
      {"fprop N=1 K=1 T=3", "T is 3, must be 0; nothing is gathered or scattered"},
      {"fprop N=1 K=1 top_k=2", "top_k is 2, must be 1; nothing is gathered or scattered"},
      {"fprop N=1 K=1 gather=rhs T=3",
       "gather is rhs, must be no or lhs; only wgrad has rows on that side"},
      {"dgrad N=1 K=1 gather=rhs T=3",
       "gather is rhs, must be no or lhs; only wgrad has rows on that side"},
      {"fprop N=1 K=1 gather=lhs", "T is 0, must be 1 or more"},
      {"fprop N=1 K=1 gather=lhs T=2147483648",
       "T is 2147483648, must be below 2^31; rows are numbered in int32"},
      {"fprop N=1 K=1 gather=lhs T=3 top_k=0", "top_k is 0, must be 1 or more"},
      {"fprop N=1 K=1 gather=lhs T=65536 top_k=32768",
       "T * top_k is 2147483648, must be below 2^31; rows are numbered in int32"},
      {"fprop N=1 K=1000000 gather=lhs T=1000000000",
       "T * K is 1000000000 * 1000000, must be at most 2^44; no tensor has more elements"},
      {"dgrad N=1000000 K=1 gather=lhs T=1000000000",
       "T * N is 1000000000 * 1000000, must be at most 2^44; no tensor has more elements"},
      {"fprop N=1 K=1 format=mxfp8 gather=lhs T=3",
       "x is mxfp8, must be f32, bf16 or f16; codes are not gathered"},
      {"wgrad N=1 K=1 dy=nvfp4 x=bf16 gather=lhs T=3",
       "dy is nvfp4, must be f32, bf16 or f16; codes are not gathered"},
      {"wgrad N=1 K=1 dy=bf16 x=nvfp4 gather=rhs T=3",
       "x is nvfp4, must be f32, bf16 or f16; codes are not gathered"},
      {"dgrad N=1 K=1 gather=lhs T=3 lhs_major=column",
       "lhs_major is column, must be row; whole rows are gathered"},
      {"wgrad N=1 K=1 gather=rhs T=3 rhs_major=column",
       "rhs_major is column, must be row; whole rows are gathered"},
  };
  for (const auto& row : kRows)
    EXPECT_EQ(refusal(text("grouped_gemm ", row.words)), text("grouped_gemm: ", row.said));
  EXPECT_EQ(test::invalid([] { parsed("grouped_gemm fprop gather=both"); }),
            "problem: gather is 'both', must be one of no, lhs, rhs");
}

TEST(GroupedGemmChecks, OrdersOfCodesAndScales) {
  const struct {
    const char *words, *said;
  } kRows[] = {
      {"fprop N=1 K=1 x=mxfp8 lhs_major=column",
       "lhs_major is column, must be row for mxfp8; codes of routed rows lie row-major"},
      {"wgrad N=1 K=1 x=mxfp8 rhs_major=column",
       "rhs_major is column, must be row for mxfp8; codes of routed rows lie row-major"},
      {"fprop N=1 K=1 w=nvfp4 rhs_major=column",
       "rhs_major is column, must be row for nvfp4; along K the contraction is innermost already"},
      {"fprop N=1 K=1 lhs_scales_major=column",
       "lhs_scales_major is column, must be row for bf16; it has no block scales"},
      {"dgrad N=1 K=1 w=fp8_tensor rhs_scales_major=column",
       "rhs_scales_major is column, must be row for fp8_tensor; it has no block scales"},
      {"wgrad N=1 K=1 dy=mxfp8 lhs_scales_major=column",
       "lhs_scales_major is column, must be row for mxfp8; blocks that run down routed rows have "
       "one row of scales each"},
      {"fprop N=1 K=1 x=fp8_block:2d lhs_scales_major=column",
       "lhs_scales_major is column, must be row for fp8_block:2d; blocks that run down routed rows "
       "have one row of scales each"},
  };
  for (const auto& row : kRows)
    EXPECT_EQ(refusal(text("grouped_gemm ", row.words)), text("grouped_gemm: ", row.said));
}

TEST(GroupedGemmChecks, HandMadeProblems) {
  GroupedGemmProblem p = parsed("grouped_gemm fprop R=1 N=1 K=1");
  p.rows = -1;
  EXPECT_EQ(test::invalid([&] { plan(p, this_cpu()); }),
            "grouped_gemm: R is -1, must be 0 or more [grouped_gemm fprop R=-1 N=1 K=1 E=1 "
            "format=bf16]");
  p.rows = 1, p.unit_budget = -2;
  EXPECT_EQ(test::invalid([&] { plan(p, this_cpu()); }),
            "grouped_gemm: unit_budget is -2, must be 0 or more [grouped_gemm fprop R=1 N=1 K=1 "
            "E=1 format=bf16 unit_budget=-2]");
  p.unit_budget = 0, p.align = -16;
  EXPECT_EQ(test::invalid([&] { plan(p, this_cpu()); }),
            "grouped_gemm: align is -16, must be a power of two; it counts bytes [grouped_gemm "
            "fprop R=1 N=1 K=1 E=1 format=bf16 align=-16]");
  p.align = 16, p.pass = Pass(3);
  EXPECT_EQ(test::invalid([&] { plan(p, this_cpu()); }),
            "problem: pass is number 3, must be 0 to 2: fprop to wgrad");
  p.pass = Pass::kFprop, p.lhs.element = DType::kF32;
  EXPECT_EQ(test::invalid([&] { plan(p, this_cpu()); }),
            "format: element of bf16 is f32, must be bf16");
  p = parsed("grouped_gemm fprop R=1 N=2 K=1 act=swiglu");
  p.activation->constants.limit = 3;
  EXPECT_EQ(test::invalid([&] { plan(p, this_cpu()); }),
            "grouped_gemm: limit, alpha, offset are 3, 1.702, 1, must be the defaults; only "
            "clamped_swiglu has constants [grouped_gemm fprop R=1 N=2 K=1 E=1 format=bf16 "
            "act=swiglu limit=3]");
}

// A good problem with its good arguments, spoiled one at a time.
struct Arguments {
  test::Counts counts{.rows = 6, .of = {4, 1}};
  test::GemmCase c;
  explicit Arguments(std::string_view words) : c(full(words), counts, 1) {}

  GroupedGemmProblem full(std::string_view words) const {
    GroupedGemmProblem p = parsed(text("grouped_gemm ", words));
    p.rows = counts.rows, p.experts = counts.experts();
    return p;
  }
  template <class Spoil>
  std::string said(Spoil&& spoil) {
    std::string words;
    c.run_by(1 << 12, [&](GroupedGemmArgs args, Workspace workspace) {
      spoil(args);
      words = test::invalid([&] { run(plan(c.p, this_cpu()), args, workspace, {}); });
    });
    return words.substr(0, words.find(" [grouped_gemm"));
  }
};

TEST(GroupedGemmChecks, ShapesAndStrides) {
  Arguments a("fprop N=3 K=5 format=f32");
  const auto x = [&](auto spoil) {
    return a.said([&](GroupedGemmArgs& g) { spoil(g.lhs.codes); });
  };
  EXPECT_EQ(x([](TensorView& v) { v.dtype = DType::kBf16; }),
            "grouped_gemm: x is bf16[6, 5], must be f32[6, 5]");
  EXPECT_EQ(x([](TensorView& v) { v.shape[0] = 7; }),
            "grouped_gemm: x is f32[7, 5], must be f32[6, 5]");
  EXPECT_EQ(x([](TensorView& v) {
              v.stride = {1, 6};
            }),
            "grouped_gemm: x is f32[6, 5] strides (1, 6), must be row-major with stride 1 inside "
            "and rows that do not overlap; copy it");
  EXPECT_EQ(x([](TensorView& v) { v.stride[0] = 4; }),
            "grouped_gemm: x is f32[6, 5] strides (4, 1), must be row-major with stride 1 inside "
            "and rows that do not overlap; copy it");
  EXPECT_EQ(x([](TensorView& v) { v.stride[0] = int64_t{1} << 42; }),
            "grouped_gemm: x is f32[6, 5] strides (4398046511104, 1), must have strides that reach "
            "2^44 elements at most");
  EXPECT_EQ(x([](TensorView& v) { v.data = nullptr; }),
            "grouped_gemm: x is null, must be f32[6, 5]");
  EXPECT_EQ(x([](TensorView& v) { v.data = static_cast<char*>(v.data) + 2; }).substr(0, 21),
            "grouped_gemm: x is at");
  EXPECT_EQ(a.said([](GroupedGemmArgs& g) { g.rhs.codes.rank = 2; }),
            "grouped_gemm: w is f32[2, 3] strides (15, 5), must be f32[2, 3, 5]");
  EXPECT_EQ(a.said([](GroupedGemmArgs& g) { g.rhs.codes.stride[0] = 14; }),
            "grouped_gemm: w is f32[2, 3, 5] strides (14, 5, 1), must be row-major with stride 1 "
            "inside and rows that do not overlap; copy it");
  EXPECT_EQ(a.said([](GroupedGemmArgs& g) { g.out.shape[1] = 5; }),
            "grouped_gemm: y is bf16[6, 5] strides (3, 1), must be bf16[6, 3]");
  EXPECT_EQ(a.said([](GroupedGemmArgs& g) { g.offsets.experts = 3; }),
            "grouped_gemm: offsets.experts is 3, must be 2; the experts of the problem");
  EXPECT_EQ(a.said([](GroupedGemmArgs& g) { g.offsets.data = nullptr; }),
            "grouped_gemm: offsets.data is null, must point to 3 elements");
}

// Of one row, or one column, the stride says nothing, but those of experts do.
TEST(GroupedGemmChecks, ExpertsDoNotOverlap) {
  Arguments one_row("wgrad N=1 K=5 out=f32"), one_column("wgrad N=3 K=1 out=f32");
  EXPECT_EQ(one_row.said([](GroupedGemmArgs& g) {
    g.out.stride = {4, 1, 1};
  }),
            "grouped_gemm: dw is f32[2, 1, 5] strides (4, 1, 1), must be row-major with stride 1 "
            "inside and rows that do not overlap; copy it");
  EXPECT_EQ(one_column.said([](GroupedGemmArgs& g) {
    g.out.stride = {2, 1, 1};
  }),
            "grouped_gemm: dw is f32[2, 3, 1] strides (2, 1, 1), must be row-major with stride 1 "
            "inside and rows that do not overlap; copy it");
  one_row.c.run_by(1 << 20, [&](GroupedGemmArgs args, Workspace workspace) {
    args.out.stride = {5, 100, 1};
    EXPECT_NO_THROW(run(plan(one_row.c.p, this_cpu()), args, workspace, {}));
  });
}

TEST(GroupedGemmChecks, DenseRowsHaveNoOffsets) {
  const GroupedGemmProblem p =
      parsed("grouped_gemm fprop R=6 N=3 K=5 E=1 format=bf16 out=f32 dense=yes");
  test::GemmCase c(p, {.rows = 6, .of = {6}}, 1);
  for (const std::string_view name : test::implementations(p)) EXPECT_EQ(c.check(name), "") << name;
  c.run_by(0, [&](GroupedGemmArgs args, Workspace) {
    args.offsets = {c.offsets.data(), 1};
    EXPECT_EQ(test::invalid([&] { check(plan(p, this_cpu()), args); }),
              text("grouped_gemm: offsets.data is given, must be null; the problem says dense=yes",
                   " [", p, "]"));
  });
}

TEST(GroupedGemmChecks, ColumnMajorAndFourBits) {
  Arguments column("dgrad N=3 K=5 format=f32 out_major=column");
  EXPECT_EQ(column.said([](GroupedGemmArgs& g) {
    g.out.stride = {5, 1};
  }),
            "grouped_gemm: dx is bf16[6, 5], must be column-major with stride 1 inside and rows "
            "that do not overlap; copy it");
  Arguments nibbles("fprop N=3 K=5 format=nvfp4");
  EXPECT_EQ(
      nibbles.said([](GroupedGemmArgs& g) { g.lhs.codes.stride[0] = 5; }),
      "grouped_gemm: x is e2m1[6, 5], must have even strides; a row of nibbles starts at a byte");
}

TEST(GroupedGemmChecks, Scales) {
  Arguments blocks("fprop N=3 K=5 format=nvfp4");
  EXPECT_EQ(blocks.said([](GroupedGemmArgs& g) { g.lhs.scales = {}; }).substr(0, 24),
            "grouped_gemm: x.scales i");
  EXPECT_EQ(blocks.said([](GroupedGemmArgs& g) { g.lhs.expert_scale = nullptr; }),
            "grouped_gemm: x.expert_scale is null, must point to 2 elements; its format has one "
            "per expert");
  Arguments plain("fprop N=3 K=5");
  float factor = 1;
  EXPECT_EQ(plain.said([&](GroupedGemmArgs& g) { g.rhs.expert_scale = &factor; }),
            "grouped_gemm: w.expert_scale is given, must be null; its format has none");
  EXPECT_EQ(plain.said([&](GroupedGemmArgs& g) { g.rhs.scales = view(&factor, DType::kF32, {1}); }),
            "grouped_gemm: w.scales is given, must be null; its format has no block scales");
  const void* pointers[] = {&factor, &factor};
  EXPECT_EQ(plain.said([&](GroupedGemmArgs& g) { g.rhs.discrete_scales = pointers; }),
            "grouped_gemm: w.discrete_scales is given, must be null; its format has no block "
            "scales");
}

TEST(GroupedGemmChecks, Discrete) {
  void* pointers[] = {nullptr, nullptr};
  Arguments packed("wgrad N=3 K=5");
  EXPECT_EQ(packed.said([&](GroupedGemmArgs& g) { g.discrete_out = pointers; }),
            "grouped_gemm: discrete_out is given, must be null; the problem says packed");
  Arguments weights("fprop N=3 K=5 discrete_rhs=yes");
  EXPECT_EQ(weights.said([](GroupedGemmArgs& g) { g.rhs.discrete = nullptr; }),
            "grouped_gemm: w.discrete is null, must point to the experts; the problem says "
            "discrete");
  EXPECT_NE(weights
                .said([](GroupedGemmArgs& g) {
                  g.rhs.discrete = reinterpret_cast<const void* const*>(
                      reinterpret_cast<const char*>(g.rhs.discrete) + 4);
                })
                .find(", must be aligned to 8 bytes"),
            std::string::npos);
  EXPECT_EQ(weights.said([&](GroupedGemmArgs& g) { g.rhs.codes.data = pointers; }),
            "grouped_gemm: w is given, must be null; its experts are discrete");
}

TEST(GroupedGemmChecks, Epilogue) {
  Arguments bare("fprop N=3 K=5");
  float one = 1;
  EXPECT_EQ(bare.said([&](GroupedGemmArgs& g) { g.alpha = &one; }),
            "grouped_gemm: alpha is given, must be null; the problem has none");
  EXPECT_EQ(bare.said([&](GroupedGemmArgs& g) { g.bias_scale = &one; }),
            "grouped_gemm: bias_scale is given, must be null; the problem has none");
  EXPECT_EQ(bare.said([&](GroupedGemmArgs& g) { g.c = g.out; }),
            "grouped_gemm: c is given, must be null; the problem has no beta");
  EXPECT_EQ(bare.said([&](GroupedGemmArgs& g) { g.bias = g.out; }),
            "grouped_gemm: bias is given, must be null; the problem has none");
  Arguments all("fprop N=3 K=5 alpha=yes beta=yes bias=yes bias_scale=yes");
  EXPECT_EQ(all.said([](GroupedGemmArgs& g) { g.alpha = nullptr; }),
            "grouped_gemm: alpha is null, must point to 2 elements; the problem asks for it");
  EXPECT_EQ(all.said([](GroupedGemmArgs& g) { g.beta = nullptr; }),
            "grouped_gemm: beta is null, must point to 2 elements; the problem asks for it");
  EXPECT_EQ(all.said([](GroupedGemmArgs& g) { g.bias_scale = nullptr; }),
            "grouped_gemm: bias_scale is null, must point to 6 elements; the problem asks for it");
  EXPECT_EQ(all.said([](GroupedGemmArgs& g) { g.bias.shape[1] = 4; }),
            "grouped_gemm: bias is bf16[2, 4] strides (3, 1), must be bf16[2, 3]");
  EXPECT_EQ(all.said([](GroupedGemmArgs& g) { g.c.data = nullptr; }),
            "grouped_gemm: c is null, must be bf16[6, 3]");
  EXPECT_EQ(bare.said([&](GroupedGemmArgs& g) { g.z = g.out; }),
            "grouped_gemm: z is given, must be null; the problem does not keep it");
  EXPECT_EQ(bare.said([&](GroupedGemmArgs& g) { g.prob = &one; }),
            "grouped_gemm: prob is given, must be null; the problem has none");
  Arguments gated("fprop N=4 K=5 act=swiglu z=yes prob=yes");
  EXPECT_EQ(gated.said([](GroupedGemmArgs&) {}),
            "grouped_gemm: y is bf16[6, 4], must be bf16[6, 2]");
  EXPECT_EQ(gated.said([](GroupedGemmArgs& g) { g.out.shape[1] = 2; }),
            "grouped_gemm: prob is null, must point to 6 elements; the problem asks for it");
  EXPECT_EQ(gated.said([&](GroupedGemmArgs& g) { g.out.shape[1] = 2, g.prob = &one; }),
            "grouped_gemm: z is f32[], must be bf16[6, 4]");
  Arguments device("wgrad N=3 K=5 accumulate=device");
  EXPECT_EQ(device.said([](GroupedGemmArgs& g) { g.accumulate = nullptr; }),
            "grouped_gemm: accumulate is null, must point to 1 element; the problem asks for it");
}

TEST(GroupedGemmChecks, GatheredRows) {
  std::vector<int32_t> slots(6, 0);
  Arguments rows("wgrad N=3 K=5");
  EXPECT_EQ(rows.said([&](GroupedGemmArgs& g) { g.slot_of = slots.data(); }),
            "grouped_gemm: slot_of is given, must be null; the problem has none");
  Arguments lhs("wgrad N=3 K=5");
  lhs.c.p.gather = Gather::kLhs, lhs.c.p.tokens = 4, lhs.c.p.top_k = 2;
  EXPECT_EQ(lhs.said([&](GroupedGemmArgs& g) { g.slot_of = slots.data(); }),
            "grouped_gemm: dy is bf16[6, 3], must be bf16[4, 3]");
  EXPECT_EQ(lhs.said([](GroupedGemmArgs& g) { g.lhs.codes.shape[0] = 4; }),
            "grouped_gemm: slot_of is null, must point to 6 elements; the problem asks for it");
  Arguments rhs("wgrad N=3 K=5");
  rhs.c.p.gather = Gather::kRhs, rhs.c.p.tokens = 4, rhs.c.p.top_k = 2;
  EXPECT_EQ(rhs.said([&](GroupedGemmArgs& g) { g.slot_of = slots.data(); }),
            "grouped_gemm: x is bf16[6, 5], must be bf16[4, 5]");
}

TEST(GroupedGemmChecks, NothingIsWrittenWhenAnArgumentIsWrong) {
  Arguments a("fprop N=3 K=5 tail=zero");
  const auto result = a.c.run_by(1 << 12, [&](GroupedGemmArgs args, Workspace workspace) {
    args.lhs.codes.shape[1] = 4;
    EXPECT_THROW(run(plan(a.c.p, this_cpu()), args, workspace, {}), InvalidArgument);
  });
  EXPECT_TRUE(result.out.untouched(0, 6));
}

TEST(GroupedGemmPlans, NameThemselvesAndSayWhyOthersRefused) {
  const auto expect_refusal = [](std::string_view words, std::string_view refusal) {
    const GroupedGemmPlan chosen = plan(parsed(words), this_cpu());
    EXPECT_TRUE(chosen.exact);
    std::string all;
    for (const auto& [who, why] : chosen.refusals) {
      EXPECT_NE(who, chosen.name);
      all += text(who, " ", why, "\n");
    }
    EXPECT_NE(all.find(text(refusal, "\n")), std::string::npos) << all;
  };
  expect_refusal("grouped_gemm fprop R=8 N=4 K=4 format=mxfp8",
                 "cpu_avx512_bf16 takes operands whose decoded codes are bf16 numbers, not mxfp8");
  expect_refusal("grouped_gemm wgrad R=8 N=4 K=4 format=f32", "cpu_avx512 takes fprop and dgrad");
  for (const char* order : {"rhs_major", "lhs_scales_major", "rhs_scales_major"})
    for (const char* name : {"cpu_avx512", "cpu_portable"})
      expect_refusal(text("grouped_gemm dgrad R=8 N=4 K=4 E=1 format=fp8_block ", order, "=column"),
                     text(name, " takes row-major codes and scales"));
  expect_refusal("grouped_gemm dgrad R=8 N=4 K=4 format=nvfp4 rhs_major=column",
                 "cpu_portable takes row-major codes and scales");
  EXPECT_NE(plan(parsed("grouped_gemm wgrad R=8 N=4 K=4 format=f32"), this_cpu()).name,
            "cpu_reference");
}

}  // namespace
