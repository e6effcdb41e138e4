// An activation that quantises what it computes, on the GPU: the bits of the two operations on the
// CPU; dprob adds up the same terms in another order, which activation_on_device_test looks at.
#include <cmath>

#include "tests/cuda/mirror.h"
#include "tests/judge/errors.h"
#include "tests/ops/activation_codes_case.h"

namespace cadre {
namespace {

using test::Tensor;
using Case = test::ActivationCodesCase;

/// Whether a block of dz would have gates and ups of other features.
bool mixes_blocks(const ActivationProblem& p) {
  return p.backward && info(p.kind).gated && p.layout == GluLayout::kConcat &&
         p.features % info(p.along_k->kind).block != 0;
}

void on_gpu(Case& c) {
  test::Mirror mirror;
  const ActivationPlan made = plan(c.p, test::first_gpu());
  EXPECT_EQ(made.name, mixes_blocks(c.p) ? "composed" : "cuda_activation_codes");
  const ActivationArgs given = c.args([&](const Tensor& t) { return mirror.view(t); },
                                      [&](auto& all) { return mirror.data(all); });
  const Workspace workspace = mirror.workspace(made.workspace_bytes);
  const size_t launches = mirror.replay(
      c.dz_is_z || c.h_is_dh ? 1 : 2, [&](Stream stream) { run(made, given, workspace, stream); });
  EXPECT_EQ(launches, c.p.rows == 0 ? 0u : mixes_blocks(c.p) ? 2u : 1u) << to_string(c.p);
}

struct ActivationCodesOnDevice : testing::TestWithParam<ActivationInfo> {
  void SetUp() override {
    if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
  }
};

void check(const Case& before, std::string_view what) {
  Case want = before, got = before;
  want.run_one_by_one();
  on_gpu(got);
  EXPECT_EQ(got.difference(want, false), "") << to_string(before.p) << " " << what;
  EXPECT_EQ(got.dprob.damage(), "");
}

TEST_P(ActivationCodesOnDevice, HaveTheBitsOfTheTwoOperations) {
  test::for_activation_codes(GetParam(), [](const ActivationProblem& p, unsigned seed) {
    const int64_t gap = seed % 3 == 0 ? 3 : seed % 3 == 1 ? 8 : 0;  // not wide, wide, without gaps
    Case c(p, int64_t(seed % 14), seed, gap);                       // from no rows to all
    c.wants_h = seed % 5 != 0;
    c.wants_dprob = seed % 7 != 0;
    c.dz_is_z = p.backward && p.plain && seed % 4 == 1;
    c.h_is_dh = p.backward && c.wants_h && seed % 2 == 0;
    check(c, text("gap=", gap));
  });
}

/// More rows than warps take at once, and blocks of them.
TEST_P(ActivationCodesOnDevice, OfManyRowsHaveTheBitsOfTheTwoOperations) {
  const int64_t warps = 16 * int64_t(test::first_gpu().units);
  for (const bool backward : {false, true}) {
    ActivationProblem p{.backward = backward, .kind = GetParam().kind, .experts = 5};
    p.rows = 4 * warps + 7;
    p.features = 128;
    p.prob = true;
    p.tail = Tail::kZero;
    p.along_k = parse_format("fp8_block");
    p.along_k_scales_major = Major::kColumn;
    p.plain = true;
    check(Case(p, p.rows - 5, 3, 0), "");
  }
}

/// Lanes beyond the last feature have nothing that such a probability makes a NaN of.
TEST_P(ActivationCodesOnDevice, OfAnInfiniteProbability) {
  for (const bool backward : {false, true})
    for (const int64_t gap : {3, 8}) {  // not wide, and wide
      ActivationProblem p{.backward = backward, .kind = GetParam().kind, .experts = 2};
      if (GetParam().gated) p.layout = GluLayout::kInterleave1;
      p.rows = 9;
      p.features = 72;
      p.prob = true;
      p.along_k = parse_format("mxfp8");
      p.plain = true;
      Case c(p, p.rows, 3, gap);
      c.prob.set({4}, HUGE_VAL);
      check(c, text("gap=", gap));
    }
}

TEST_P(ActivationCodesOnDevice, OfNoRowsAndOfBrokenOffsets) {
  for (const bool backward : {false, true})
    for (const int32_t end : {-5, 0, 4, 9, 2147483647}) {
      ActivationProblem p{.backward = backward, .kind = GetParam().kind};
      p.rows = end == 0 ? 0 : 5;
      p.features = 128;
      p.prob = true;
      p.tail = Tail::kZero;
      p.along_k = parse_format("mxfp8");
      p.plain = true;
      Case c(p, p.rows, 3, 0);
      c.offsets.back() = end;
      check(c, text("end=", end));
    }
}

INSTANTIATE_TEST_SUITE_P(Activation, ActivationCodesOnDevice, testing::ValuesIn(activation_list()),
                         [](const testing::TestParamInfo<ActivationInfo>& row) {
                           return std::string(row.param.name);
                         });

TEST(ActivationCodesPlan, SaysWhoTakesIt) {
  Device hopper{.kind = DeviceKind::kCuda};
  hopper.sm = 90;
  const auto planned = [&](const std::string& words) {
    return plan(parse_activation_problem("activation " + words), hopper);
  };
  EXPECT_EQ(planned("forward swiglu R=8 F=72 along_k=fp8_block").name, "cuda_activation_codes");
  EXPECT_EQ(planned("forward swiglu R=8 F=72 along_k=fp8_block").workspace_bytes, 0);
  const auto why = [&](const std::string& words) {
    const ActivationPlan made = planned(words);
    EXPECT_EQ(made.name, "composed");
    return made.refusals.at(1).name == "cuda_activation_codes" ? made.refusals.at(1).why : "";
  };
  EXPECT_EQ(why("forward swiglu R=8 F=72 h=f16 along_k=mxfp8"), "takes z and h in bf16");
  EXPECT_EQ(why("forward swiglu R=8 F=70 along_k=mxfp8"), "takes F that are multiples of 8");
  EXPECT_EQ(why("backward swiglu R=8 F=72 along_k=fp8_block"),
            "takes F that are multiples of 128 where gates come before ups, so that no block of dz "
            "has both");
  hopper.sm = 75;
  EXPECT_NE(test::unsupported([&] {
              planned("forward swiglu R=8 F=72 along_k=mxfp8");
            }).find("needs sm_80 or later, has sm_75"),
            std::string::npos);
}

}  // namespace
}  // namespace cadre
