// Quantise: problems as words, and every message about a problem or arguments that do not fit.
#include <gtest/gtest.h>

#include "tests/judge/errors.h"
#include "tests/ops/quantize_case.h"

using namespace cadre;
using namespace cadre::test;

namespace {

TEST(QuantizeProblem, PrintsAndParsesBack) {
  for (const char* words :
       {"quantize rows R=8192 C=4096 E=64 source=bf16 along_k=mxfp8 along_rows=mxfp8 role=x",
        "quantize weights N=2048 K=4096 E=64 source=f32 along_k=fp8_block:2d role=w discrete=yes",
        "quantize rows R=7 C=5 E=3 source=f16 along_rows=nvfp4:rht+sr role=dy",
        "quantize rows R=7 C=5 E=3 source=f16 along_k=fp8_tensor role=h amax_eps=1e-12",
        "quantize rows R=7 C=5 E=3 source=bf16 along_k=mxfp8 role=x gather=yes T=4 top_k=2",
        "quantize weights N=7 K=5 E=3 source=bf16 along_k=mxfp8 along_rows=fp8_block:2d role=w "
        "along_k_scales_major=column along_rows_codes_major=column "
        "along_rows_scales_major=column"})
    EXPECT_EQ(to_string(parse_quantize_problem(words)), words);
}

/// What plan() says about a problem, without the problem behind it.
std::string plan_error(const std::string& words) {
  const std::string error =
      invalid([&] { plan(parse_quantize_problem("quantize " + words), this_cpu()); });
  const size_t problem = error.find(" [quantize ");
  EXPECT_TRUE(problem != error.npos || error.rfind("format:", 0) == 0) << error;
  return error.substr(0, problem);
}

TEST(QuantizeProblem, BadOnesAreErrors) {
  EXPECT_EQ(plan_error("rows R=7 C=5 E=3 source=bf16 role=x"),
            "quantize: along_k and along_rows are absent, must be given one or both; they say what "
            "to write");
  EXPECT_EQ(plan_error("rows R=7 C=5 E=0 source=bf16 along_k=mxfp8 role=x"),
            "quantize: E is 0, must be 1 or more");
  EXPECT_EQ(plan_error("rows R=2147483648 C=5 E=1 source=bf16 along_k=mxfp8 role=x"),
            "quantize: R is 2147483648, must be below 2^31; rows are numbered in int32");
  EXPECT_EQ(plan_error("rows R=7 C=5 E=1 source=e4m3 along_k=mxfp8 role=x"),
            "quantize: source is e4m3, must be f32, bf16 or f16");
  EXPECT_EQ(plan_error("rows R=7 C=5 E=1 source=bf16 along_k=nvfp4:rht role=x"),
            "quantize: along_k is nvfp4:rht, must be without rht; the transform runs along rows");
  EXPECT_EQ(plan_error("weights N=7 K=5 E=1 source=bf16 along_rows=nvfp4:rht role=w"),
            "quantize: along_rows is nvfp4:rht, must be without rht; the transform is for routed "
            "rows");
  EXPECT_EQ(plan_error("rows R=7 C=5 E=1 source=bf16 along_rows=nvfp4:2d+rht role=x"),
            "quantize: along_rows is nvfp4:2d+rht, must be without 2d; a transformed copy serves "
            "one direction");
  EXPECT_EQ(plan_error("rows R=7 C=5 E=1 source=bf16 along_k=mxfp8 role=x amax_eps=-1"),
            "quantize: amax_eps is -1, must be finite and 0 or more");
  EXPECT_EQ(plan_error("rows R=7 C=5 E=1 source=bf16 along_k=mxfp8 along_rows=nvfp4 amax_eps=1"),
            "quantize: amax_eps is 1, must be 0; only fp32 scales have a least amax");
  EXPECT_EQ(plan_error("rows R=7 C=5 E=1 source=bf16 along_k=mxfp8 role=x discrete=yes"),
            "quantize: discrete is yes, must be no; routed rows are one tensor");
  QuantizeProblem p = parse_quantize_problem("quantize rows R=7 C=5 E=1 source=bf16 along_k=mxfp8");
  p.along_k->hadamard = true;
  EXPECT_EQ(invalid([&] { plan(p, this_cpu()); }),
            "format: option of mxfp8 is 'rht', must be one of e5m2, 2d, floor");
}

TEST(QuantizeProblem, BadTokensAreErrors) {
  const auto said = [](const std::string& words) {
    return plan_error("rows R=7 C=5 E=1 along_k=mxfp8 " + words);
  };
  EXPECT_EQ(said("T=3"), "quantize: T is 3, must be 0; the problem says gather=no");
  EXPECT_EQ(said("top_k=2"), "quantize: top_k is 2, must be 1; the problem says gather=no");
  EXPECT_EQ(said("gather=yes"), "quantize: T is 0, must be 1 or more");
  EXPECT_EQ(said("gather=yes T=3 top_k=0"), "quantize: top_k is 0, must be 1 or more");
  EXPECT_EQ(said("gather=yes T=2147483648"),
            "quantize: T is 2147483648, must be below 2^31; rows are numbered in int32");
  EXPECT_EQ(said("gather=yes T=1073741824 top_k=2"),
            "quantize: T * top_k is 2147483648, must be below 2^31; rows are numbered in int32");
  EXPECT_EQ(
      plan_error("rows R=7 C=1073741824 E=1 along_k=mxfp8 gather=yes T=20000"),
      "quantize: T * C is 20000 * 1073741824, must be at most 2^44; no tensor has more elements");
  EXPECT_EQ(plan_error("weights N=7 K=5 E=1 along_k=mxfp8 gather=yes T=3"),
            "quantize: gather is yes, must be no; weights are read where they lie");
}

TEST(QuantizeProblem, OrdersThatNobodyReadsAreErrors) {
  EXPECT_EQ(plan_error("weights N=7 K=5 E=1 along_rows=bf16 along_rows_codes_major=column"),
            "quantize: along_rows_codes_major is column, must be row for bf16; plain weights are "
            "multiplied in either order");
  EXPECT_EQ(plan_error("rows R=7 C=5 E=1 along_rows=mxfp8 along_rows_codes_major=column"),
            "quantize: along_rows_codes_major is column, must be row for mxfp8; codes of routed "
            "rows lie row-major");
  EXPECT_EQ(plan_error("weights N=7 K=5 E=1 along_k=fp8_tensor along_k_scales_major=column"),
            "quantize: along_k_scales_major is column, must be row for fp8_tensor; it has no block "
            "scales");
  EXPECT_EQ(plan_error("rows R=7 C=5 E=1 along_rows=nvfp4:rht along_rows_scales_major=column"),
            "quantize: along_rows_scales_major is column, must be row for nvfp4:rht; blocks that "
            "run down routed rows have one row of scales each");
  EXPECT_EQ(plan_error("rows R=7 C=5 E=1 along_k=mxfp8:2d along_k_scales_major=column"),
            "quantize: along_k_scales_major is column, must be row for mxfp8:2d; blocks that run "
            "down routed rows have one row of scales each");
}

TEST(QuantizeProblem, OrdersOfCopiesThatAreNotWantedAreErrors) {
  EXPECT_EQ(plan_error("weights N=7 K=5 E=1 along_rows=mxfp8 along_k_scales_major=column"),
            "quantize: along_k_scales_major is column, must be row; no copy along K is wanted");
  EXPECT_EQ(plan_error("weights N=7 K=5 E=1 along_k=mxfp8 along_rows_codes_major=column"),
            "quantize: along_rows_codes_major is column, must be row; no copy along rows is "
            "wanted");
  EXPECT_EQ(plan_error("weights N=7 K=5 E=1 along_k=mxfp8 along_rows_scales_major=column"),
            "quantize: along_rows_scales_major is column, must be row; no copy along rows is "
            "wanted");
}

TEST(QuantizeProblem, IsPlannedForTheCpuByName) {
  const QuantizeProblem p =
      parse_quantize_problem("quantize rows R=7 C=5 E=3 source=bf16 along_k=nvfp4 role=x");
  EXPECT_EQ(plan(p, this_cpu()).name, "cpu");
  EXPECT_TRUE(plan(p, this_cpu()).exact);
  EXPECT_EQ(plan(p, this_cpu()).workspace_bytes, 3 * 4);
  EXPECT_EQ(plan(p, this_cpu(), "cpu_reference").name, "cpu_reference");
  EXPECT_NE(invalid([&] { plan(p, this_cpu(), "gpu"); }).find("must be one of cpu, cpu_reference"),
            std::string::npos);
}

struct QuantizeArguments : testing::Test {
  QuantizeCase c = QuantizeCase::rows({.rows = 40, .of = {10, 30}}, 35, DType::kBf16)
                       .formats("nvfp4:sr", "mxfp8");
  QuantizeCase::Out out = c.outputs();
  QuantizeArgs args = c.args(out);

  /// What run() says, without the problem behind it.
  std::string said() {
    alignas(256) char workspace[64];
    const std::string error = invalid([&] {
      run(plan(c.problem, this_cpu()), args, {workspace, 64}, {});
    });
    EXPECT_EQ(out.along_k.damage() + out.along_rows.damage(), "");
    const std::string problem = text(" [", to_string(c.problem), "]");
    EXPECT_TRUE(error == "nothing was thrown" || error.ends_with(problem)) << error;
    return error.substr(0, error.find(problem));
  }
};

TEST_F(QuantizeArguments, AreAcceptedAsTheyAre) { EXPECT_EQ(said(), "nothing was thrown"); }

TEST_F(QuantizeArguments, ShapeAndTypeOfTheSource) {
  args.source = view(args.source.data, DType::kBf16, {35, 40});
  EXPECT_EQ(said(), "quantize: source is bf16[35, 40], must be bf16[40, 35]");
  args.source = view(args.source.data, DType::kF16, {40, 35});
  EXPECT_EQ(said(), "quantize: source is f16[40, 35], must be bf16[40, 35]");
  args.source = view(nullptr, DType::kBf16, {40, 35});
  EXPECT_EQ(said(), "quantize: source is null, must be bf16[40, 35]");
  args.source = view(out.along_k.codes.view().data, DType::kBf16, {40, 35}, {1, 40});
  EXPECT_EQ(said(),
            "quantize: source is bf16[40, 35] strides (1, 40), must have rows of stride 1 that do "
            "not overlap; make it contiguous");
}

TEST_F(QuantizeArguments, AlignmentOfTheSource) {
  args.source.data = static_cast<char*>(args.source.data) + 1;
  EXPECT_NE(said().find("must be aligned to 2 bytes"), std::string::npos);
}

TEST_F(QuantizeArguments, TokensAndSlots) {
  const int32_t slots[40] = {};
  args.slot_of = slots;
  EXPECT_EQ(said(), "quantize: slot_of is given, must be null; the problem says gather=no");
  c.problem.gather = true, c.problem.tokens = 41;
  EXPECT_EQ(said(), "quantize: source is bf16[40, 35] strides (40, 1), must be bf16[41, 35]");
  c.problem.tokens = 39, args.source.shape[0] = 39;
  EXPECT_EQ(said(), "nothing was thrown");
  args.slot_of = nullptr;
  EXPECT_EQ(said(),
            "quantize: slot_of is null, must point to 40 elements; the problem says gather=yes");
}

TEST_F(QuantizeArguments, ViewsOfTheCopies) {
  args.along_k.codes.dtype = DType::kE4m3;
  EXPECT_EQ(said(),
            "quantize: along_k.codes is e4m3[40, 35] strides (42, 1), must be e2m1[40, 35]");
  args = c.args(out);
  args.along_k.codes.stride[0] = 41;
  EXPECT_EQ(said(),
            "quantize: along_k.codes is e2m1[40, 35] strides (41, 1), must have even strides; a "
            "row of nibbles starts at a byte");
  args = c.args(out);
  args.along_rows.scales = {};
  EXPECT_EQ(said(), "quantize: along_rows.scales is f32[], must be e8m0[3, 35]");
  args = c.args(out);
  args.along_k.expert_scale = nullptr;
  EXPECT_EQ(said(), "quantize: along_k.expert_scale is null, must point to 2 elements");
  args = c.args(out);
  float scale[2];
  args.along_rows.expert_scale = scale;
  EXPECT_EQ(said(),
            "quantize: along_rows.expert_scale is given, must be null; this format has no expert "
            "scales");
}

TEST_F(QuantizeArguments, CopiesThatAreNotWanted) {
  c.problem.along_rows = std::nullopt;
  EXPECT_EQ(said(),
            "quantize: along_rows.codes is given, must be null; no copy along rows is wanted");
  c.formats("", "mxfp8");
  EXPECT_EQ(said(), "quantize: along_k.codes is given, must be null; no copy along K is wanted");
}

TEST_F(QuantizeArguments, ScalesThatAFormatLacks) {
  c.formats("fp8_tensor", "");
  out = c.outputs();
  args = c.args(out);
  args.along_k.scales = args.along_k.codes;
  EXPECT_EQ(said(),
            "quantize: along_k.scales is given, must be null; this format has no block scales");
}

TEST_F(QuantizeArguments, OffsetsAndRandomBits) {
  args.rng = nullptr;
  EXPECT_EQ(said(),
            "quantize: rng is null, must point to 2 elements; stochastic rounding needs a seed and "
            "an offset");
  args = c.args(out);
  args.offsets.experts = 3;
  EXPECT_EQ(said(), "quantize: offsets.experts is 3, must be 2; the experts of the problem");
  args.offsets = {};
  args.offsets.experts = 2;
  EXPECT_EQ(said(), "quantize: offsets.data is null, must point to 3 elements");
}

TEST(QuantizeWeights, PackedAndDiscreteSourcesExcludeEachOther) {
  QuantizeCase c = QuantizeCase::weights({3, 7, 5}, DType::kF32, true).formats("mxfp8", "");
  const QuantizeCase::Out out = c.outputs();
  const auto said = [&](const QuantizeArgs& args) {
    const std::string error = invalid([&] { run(plan(c.problem, this_cpu()), args, {}, {}); });
    return error.substr(0, error.find(" [quantize "));
  };
  EXPECT_EQ(said(c.args(out)), "nothing was thrown");
  QuantizeArgs args = c.args(out);
  args.source = c.source.view();
  EXPECT_EQ(
      said(args),
      "quantize: source is given, must be null; discrete weights give shape and strides only");
  args = c.args(out);
  args.discrete = nullptr;
  EXPECT_EQ(said(args), "quantize: discrete is null, must point to 3 elements");
  args = c.args(out);
  const int32_t offsets[] = {0, 1, 2, 3};
  args.offsets.data = offsets;
  EXPECT_EQ(said(args), "quantize: offsets.data is given, must be null; weights have no offsets");
  c.problem.discrete = false;
  args = c.args(out);
  args.discrete = c.discrete.data();
  EXPECT_EQ(said(args),
            "quantize: discrete is given, must be null; the problem's source is one tensor");
}

TEST(QuantizeWeights, ViewsThatShouldBeColumnMajor) {
  QuantizeCase c = QuantizeCase::weights({3, 7, 5}, DType::kF32).formats("", "nvfp4");
  c.problem.along_rows_codes_major = c.problem.along_rows_scales_major = Major::kColumn;
  const QuantizeCase::Out out = c.outputs();
  const auto said = [&](auto spoil) {
    QuantizeArgs args = c.args(out);
    spoil(args.along_rows);
    alignas(256) char workspace[64];
    const std::string error = invalid([&] {
      run(plan(c.problem, this_cpu()), args, {workspace, 64}, {});
    });
    return error.substr(0, error.find(" [quantize "));
  };
  EXPECT_EQ(said([](QuantizedView&) {}), "nothing was thrown");
  EXPECT_EQ(said([](QuantizedView& q) {
              q.codes.stride = {40, 6, 1};
            }),
            "quantize: along_rows.codes is e2m1[3, 7, 5] strides (40, 6, 1), must have columns of "
            "stride 1 that do not overlap; transpose it");
  EXPECT_EQ(said([](QuantizedView& q) { q.codes.stride[2] = 13; }),
            "quantize: along_rows.codes is e2m1[3, 7, 5] strides (70, 1, 13), must have even "
            "strides; a column of nibbles starts at a byte");
  EXPECT_EQ(said([](QuantizedView& q) { q.codes = transposed(q.codes); }),
            "quantize: along_rows.codes is e2m1[3, 5, 7] strides (70, 14, 1), must be e2m1[3, 7, "
            "5]");
  EXPECT_EQ(said([](QuantizedView& q) { q.codes.data = nullptr; }),
            "quantize: along_rows.codes is null, must be e2m1[3, 7, 5] strides (70, 1, 14)");
  EXPECT_NE(said([](QuantizedView& q) {
              q.scales = view(q.codes.data, DType::kE4m3, {3, 1, 5}, {20, 1, 0});
            }).find("must have columns of stride 1 that do not overlap"),
            std::string::npos);
}

TEST(QuantizeRun, WorkspaceThatIsTooSmallIsAnError) {
  QuantizeCase c =
      QuantizeCase::rows({.rows = 4, .of = {2, 2}}, 5, DType::kF32).formats("nvfp4", "");
  const QuantizeCase::Out out = c.outputs();
  EXPECT_NE(invalid([&] {
              run(plan(c.problem, this_cpu()), c.args(out), {}, {});
            }).find("workspace is 0 bytes, must be 8 or more"),
            std::string::npos);
}

}  // namespace
