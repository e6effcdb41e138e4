// An activation that quantises what it computes, on the CPU: the bits of the two operations, for
// all activations, layouts and formats, and what is refused.
#include <cmath>
#include <functional>

#include "activations/list.h"
#include "tests/judge/errors.h"
#include "tests/ops/activation_codes_case.h"

using namespace cadre;
using Case = test::ActivationCodesCase;

/// Without the problem behind it.
static std::string head(const std::string& error) {
  return error.substr(0, error.find(" [activation "));
}

namespace {

struct EveryActivation : testing::TestWithParam<ActivationInfo> {};

TEST_P(EveryActivation, WritesWhatQuantiseMakesOfIt) {
  test::for_activation_codes(GetParam(), [](const ActivationProblem& p, unsigned seed) {
    Case want(p, int64_t(seed % 14), seed, 3);  // from no rows to all
    want.dz_is_z = p.backward && p.plain && seed % 4 == 1;
    Case got = want;
    want.run_one_by_one();
    got.run_on_cpu();
    EXPECT_EQ(got.difference(want, true), "") << to_string(p);
    EXPECT_EQ(got.h.damage() + got.dz.damage() + got.dprob.damage(), "");
  });
}

INSTANTIATE_TEST_SUITE_P(List, EveryActivation, testing::ValuesIn(activations::All::kInfo),
                         [](const auto& given) { return std::string(given.param.name); });

TEST(ActivationCodes, OfOtherTypesToo) {
  for (const auto& [z, h] : {std::pair(DType::kF32, DType::kF32), {DType::kF16, DType::kBf16}})
    for (const bool backward : {false, true}) {
      ActivationProblem p{.backward = backward, .rows = 9, .features = 77, .z = z, .h = h};
      p.along_k = parse_format("mxfp8");
      Case want(p, 7, 3, 3);
      Case got = want;
      want.run_one_by_one();
      got.run_on_cpu("composed");
      EXPECT_EQ(got.difference(want, true), "") << to_string(p);
    }
}

TEST(ActivationCodes, PrintAndParseBack) {
  const char* words =
      "activation backward swiglu R=8 F=256 E=2 z=bf16 h=bf16 along_k=fp8_block:fp32 "
      "along_k_scales_major=column amax_eps=0.25 plain=yes";
  EXPECT_EQ(to_string(parse_activation_problem(words)), words);
}

TEST(ActivationCodes, AreNotOfThePlainImplementations) {
  const ActivationProblem p =
      parse_activation_problem("activation forward swiglu R=8 F=64 along_k=mxfp8");
  const ActivationPlan made = plan(p, this_cpu());
  EXPECT_EQ(made.name, "composed");
  ASSERT_EQ(made.refusals.size(), 1u);
  for (const char* plain : {"cpu", "cpu_reference"})
    EXPECT_NE(test::unsupported([&] { plan(p, this_cpu(), plain); }).find("writes no codes"),
              std::string::npos)
        << plain;
  ActivationProblem none = p;
  none.along_k.reset();
  EXPECT_NE(test::unsupported([&] {
              plan(none, this_cpu(), "composed");
            }).find("composed: is for activations whose result is quantised"),
            std::string::npos);
}

std::string plan_error(const std::string& words) {
  return head(test::invalid([&] {
    plan(parse_activation_problem("activation forward swiglu R=4 F=64 " + words), this_cpu());
  }));
}

TEST(ActivationCodesErrors, Problems) {
  for (const char* format : {"bf16", "nvfp4", "fp8_tensor", "fp8_row", "fp8_block:2d"})
    EXPECT_EQ(plan_error(std::string("along_k=") + format),
              std::string("activation: along_k is ") + format +
                  ", must be one of fp8_block, mxfp8, mxfp4 without 2d and sr; other scales need "
                  "more than a block of a row, and a quantise behind the activation");
  EXPECT_EQ(plan_error("plain=yes"),
            "activation: plain is yes, must be no; without along_k nothing else is written");
  EXPECT_EQ(plan_error("along_k_scales_major=column"),
            "activation: along_k_scales_major is column, must be row; no copy along K is wanted");
  EXPECT_EQ(plan_error("amax_eps=0.5"),
            "activation: amax_eps is 0.5, must be 0; no copy along K is wanted");
  EXPECT_EQ(plan_error("along_k=mxfp8 amax_eps=-1"),
            "activation: amax_eps is -1, must be finite and 0 or more");
  EXPECT_EQ(plan_error("along_k=mxfp8 amax_eps=1"),
            "activation: amax_eps is 1, must be 0; only fp32 scales have a least amax");
}

struct ActivationCodesArgs : testing::Test {
  ActivationProblem p =
      parse_activation_problem("activation forward relu R=3 F=32 z=f32 h=f32 along_k=mxfp8");
  Case c{p, 3, 1, 0};

  std::string error(const std::function<void(ActivationArgs&)>& change) {
    const ActivationPlan made = plan(p, this_cpu());
    const test::OwnedWorkspace workspace(made.workspace_bytes);
    ActivationArgs args = c.args([](const test::Tensor& t) { return t.view(); },
                                 [](auto& all) { return all.data(); });
    change(args);
    return head(test::invalid([&] { run(made, args, workspace.get(), {}); }));
  }
};

TEST_F(ActivationCodesArgs, MustFit) {
  EXPECT_EQ(error([&](ActivationArgs& a) { a.h = c.h.view(); }),
            "activation: h is given, must be null; the problem says plain=no");
  EXPECT_EQ(error([](ActivationArgs& a) { a.along_k.codes = {}; }),
            "activation: along_k.codes is f32[], must be e4m3[3, 32]");
  EXPECT_EQ(error([](ActivationArgs& a) { a.along_k.scales.data = nullptr; }),
            "activation: along_k.scales is null, must be e8m0[3, 1]");
  p.backward = c.p.backward = true;
  EXPECT_EQ(error([&](ActivationArgs& a) { a.dz = c.dz.view(); }),
            "activation: dz is given, must be null; the problem says plain=no");
  p.along_k.reset();
  EXPECT_EQ(error([&](ActivationArgs& a) { a.dz = c.dz.view(); }),
            "activation: along_k.codes is given, must be null; no copy along K is wanted");
}

}  // namespace
