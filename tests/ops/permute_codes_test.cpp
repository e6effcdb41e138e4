// permute of tokens that are codes and scales.
#include <gtest/gtest.h>

#include "cadre/quantize.h"
#include "tests/judge/errors.h"
#include "tests/judge/workspace.h"
#include "tests/ops/permute_codes_case.h"

using namespace cadre;
using test::Tensor;
using Case = test::PermuteCodesCase;

namespace {

TEST(PermuteOfCodes, FastIsReference) {
  for (const std::string_view words : test::kPermuteOfCodes)
    for (unsigned seed = 0; seed < 4; ++seed) {
      Case got(words, seed), want(words, seed);
      run(plan(got.p, this_cpu(), "cpu"), got.args(), {}, {});
      run(plan(want.p, this_cpu(), "cpu_reference"), want.args(), {}, {});
      EXPECT_EQ(got.outputs(), want.outputs()) << words;
      EXPECT_EQ(got.rows.damage() + got.row_scales.damage(), "") << words;
      EXPECT_TRUE(got.p.tail == Tail::kZero || got.rows.untouched(got.used(), got.p.rows)) << words;
    }
}

/// Tokens that were quantised and then moved are rows that were moved and then quantised.
TEST(PermuteOfCodes, IsWhatQuantiseOfRowsMakes) {
  for (const std::string_view words :
       {"permute permute T=13 top_k=3 R=43 H=192 E=5 format=mxfp8",
        "permute permute T=13 top_k=3 R=43 H=386 E=5 format=fp8_block scales_major=column",
        "permute permute T=13 top_k=3 R=43 H=386 E=5 format=fp8_row:e5m2"}) {
    Case got(words, 2);
    const PermuteProblem& p = got.p;
    Tensor x(DType::kBf16, {p.tokens, p.hidden});
    std::mt19937 random(1);
    x.fill(random, -3, 3);
    const auto quantize = [&](QuantizeProblem q, QuantizeArgs args) {
      q.cols = p.hidden;
      q.along_k = p.format;
      const QuantizePlan made = plan(q, this_cpu());
      run(made, args, test::OwnedWorkspace(made.workspace_bytes).get(), {});
    };
    const int32_t ends[] = {0, int32_t(p.tokens)};
    quantize({.rows = p.tokens},
             {.source = x.view(),
              .offsets = {ends, 1},
              .along_k = {.codes = got.tokens.view(), .scales = got.token_scales.view()}});
    run(plan(p, this_cpu()), got.args(), {}, {});
    Case want(words, 2);
    const PermuteArgs to = want.args();
    quantize({.rows = p.rows,
              .experts = p.experts,
              .gather = true,
              .tokens = p.tokens,
              .top_k = p.top_k,
              .along_k_scales_major = p.scales_major},
             {.source = x.view(),
              .slot_of = want.routed.slot_of.data(),
              .offsets = to.offsets,
              .along_k = {.codes = to.rows, .scales = to.row_scales}});
    EXPECT_GT(got.used(), 20);
    EXPECT_EQ(got.outputs(), want.outputs()) << words;
  }
}

TEST(PermuteOfCodes, PrintsAndParsesBack) {
  const std::string words =
      "permute permute T=4 top_k=2 R=8 H=128 E=64 dtype=bf16 tail=zero format=fp8_block:e5m2 "
      "scales_major=column";
  EXPECT_EQ(to_string(parse_permute_problem(words)), words);
}

/// Without the problem behind it.
template <class Work>
std::string error(Work&& work) {
  const std::string message = test::invalid(work);
  return message.substr(0, message.rfind(" ["));
}

TEST(PermuteOfCodesErrors, OfProblems) {
  const auto plan_error = [](std::string_view words) {
    return error([&] { plan(parse_permute_problem(words), this_cpu()); });
  };
  constexpr std::string_view kFormats =
      ", must be fp8_row, fp8_block or mxfp8, without 2d; codes of a byte whose scales are of one "
      "row";
  for (const char* format : {"bf16", "nvfp4", "mxfp4", "fp8_tensor", "fp8_block:2d"})
    EXPECT_EQ(plan_error(text("permute permute H=128 format=", format)),
              text("permute: format is ", format, kFormats));
  EXPECT_EQ(plan_error("permute combine H=128 format=mxfp8"),
            "permute: format is given, must be left out; only permute moves rows as they are "
            "stored");
  EXPECT_EQ(plan_error("permute permute H=96 format=mxfp8"),
            "permute: H is 96, must be a multiple of 64 for mxfp8; codes and scales move two bytes "
            "at a time");
  EXPECT_EQ(plan_error("permute permute H=7 format=fp8_block"),
            "permute: H is 7, must be a multiple of 2 for fp8_block; codes and scales move two "
            "bytes at a time");
  EXPECT_EQ(plan_error("permute permute H=128 format=mxfp8 scales_major=column"),
            "permute: scales_major is column, must be row for mxfp8; only fp32 scales lie in "
            "columns");
  EXPECT_EQ(plan_error("permute permute H=128 scales_major=column"),
            "permute: scales_major is column, must be row; there is no format");
}

TEST(PermuteOfCodesErrors, OfArguments) {
  const auto running = [](auto&& spoil) {
    Case c("permute permute T=4 top_k=2 R=8 H=130 E=3 format=fp8_block", 0);
    PermuteArgs args = c.args();
    spoil(args, c);
    return error([&] { run(plan(c.p, this_cpu()), args, {}, {}); });
  };
  EXPECT_EQ(running([](PermuteArgs& a, Case&) { a.tokens.dtype = DType::kE5m2; }),
            "permute: tokens is e5m2[4, 130], must be e4m3[4, 130]");
  EXPECT_EQ(running([](PermuteArgs& a, Case&) { a.token_scales.shape[1] = 1; }),
            "permute: token_scales is f32[4, 1] strides (2, 1), must be f32[4, 2]");
  EXPECT_EQ(running([](PermuteArgs& a, Case&) { a.row_scales.data = nullptr; }),
            "permute: row_scales is null, must be f32[8, 2]");
  const auto odd = [&](auto&& spoil) {
    std::string words = running(spoil);
    const size_t at = words.find(" at ");
    return words.erase(at, words.find(", must") - at);
  };
  EXPECT_EQ(odd([](PermuteArgs& a, Case&) { a.tokens.stride[0] = 131; }),
            "permute: tokens is e4m3[4, 130] strides (131, 1), must have rows at even addresses; "
            "they move two bytes at a time");
  EXPECT_EQ(odd([](PermuteArgs& a, Case&) { a.rows.data = static_cast<char*>(a.rows.data) + 1; }),
            "permute: rows is e4m3[8, 130], must have rows at even addresses; they move two bytes "
            "at a time");
  test::PermuteCase plain({.tokens = 4, .top_k = 2, .rows = 8, .hidden = 2, .experts = 3}, 1);
  PermuteArgs args = plain.args();
  args.token_scales = plain.tokens.view();
  EXPECT_EQ(error([&] { run(plan(plain.p, this_cpu()), args, {}, {}); }),
            "permute: token_scales is given, must be null; the problem has no format");
  std::swap(args.token_scales, args.row_scales);
  EXPECT_EQ(error([&] { run(plan(plain.p, this_cpu()), args, {}, {}); }),
            "permute: row_scales is given, must be null; the problem has no format");
}

}  // namespace
