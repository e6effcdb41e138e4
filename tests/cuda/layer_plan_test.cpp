// Which layers have a plan on Hopper, what is said of the others, and that a layer refuses
// arguments before it launches anything. Needs no GPU: plans are values.
#include <gtest/gtest.h>

#include "cadre/moe.h"
#include "cadre/sequential.h"
#include "tests/judge/errors.h"
#include "tests/layers/mlp_case.h"
#include "tests/layers/row_case.h"

using namespace cadre;
using test::Counts;
using test::invalid;
using test::LinearCase;
using test::MlpCase;
using test::unsupported;

namespace {

const Counts kCounts{.rows = 20, .of = {7, 0, 11}};

test::MadeFor hopper() { return {parse_device("sm_90"), 8}; }

GroupedLinearProblem linear(std::string_view recipe) {
  GroupedLinearProblem p{.rows = 20, .n = 24, .k = 16, .experts = 3};
  p.recipe = parse_recipe(recipe);
  p.bias = true;
  return p;
}
GroupedMlpProblem mlp(std::string_view recipe) {
  GroupedMlpProblem p{.rows = 20, .hidden = 16, .features = 32, .experts = 3};
  p.recipe = parse_recipe(recipe);
  p.prob = p.bias1 = p.bias2 = p.bias2_scale = true;
  return p;
}

TEST(LayerPlan, TakesTheKernelOfCodesByName) {
  const auto named = [](GroupedLinearProblem p, const Device& device = hopper().device) {
    p.n = 32;
    return plan(p, device, "sm90_fp8_rows");
  };
  const GroupedLinearPlan made = named(linear("fp8_block"));
  EXPECT_EQ(made.name, "sm90_fp8_rows");
  EXPECT_EQ(find_step<GroupedGemmPlan>(made, "multiply")->name, "sm90_fp8_rows");
  EXPECT_EQ(find_step<GroupedGemmPlan>(made, "dx")->name, "sm90_fp8_rows");
  EXPECT_EQ(find_step<GroupedGemmPlan>(made, "dw")->name, "sm90_ragged_contraction");
  EXPECT_EQ(find_step<QuantizePlan>(made, "quantize x")->problem.along_k_scales_major,
            Major::kColumn);
  EXPECT_EQ(find_step<QuantizePlan>(made, "quantize w again")->problem.along_rows_codes_major,
            Major::kColumn);
  GroupedLinearProblem given = linear("fp8_block");
  given.options.quantized_x = true;
  EXPECT_EQ(find_step<GroupedGemmPlan>(named(given), "multiply")->name, "sm90_ragged_rows");
  EXPECT_EQ(find_step<GroupedGemmPlan>(named(given), "dx")->name, "sm90_fp8_rows");
  EXPECT_EQ(plan(linear("fp8_block"), hopper().device).name, "decoded");
  const char* why = "sm90_fp8_rows: it takes no product that others do not take";
  EXPECT_NE(unsupported([&] { named(linear("mxfp8")); }).find(why), std::string::npos);
  EXPECT_NE(unsupported([&] { named(linear("bf16")); }).find(why), std::string::npos);
  EXPECT_NE(unsupported([&] { named(linear("fp8_block"), this_cpu()); }).find(why),
            std::string::npos);
}

TEST(LayerPlan, OfA16BitRecipeNamesTheKernels) {
  for (const char* recipe : {"bf16", "f16"})
    for (bool discrete : {false, true})
      for (Accumulate accumulate : {Accumulate::kNo, Accumulate::kYes, Accumulate::kPerExpert}) {
        GroupedLinearProblem p = linear(recipe);
        p.dtype = p.parameters.weight = p.recipe.fprop.rhs.element;
        p.parameters.dw = accumulate == Accumulate::kNo ? p.dtype : DType::kF32;
        p.parameters.discrete_weight = p.parameters.discrete_dw = discrete;
        p.options.accumulate = accumulate;
        const GroupedLinearPlan made = plan(p, hopper().device);
        EXPECT_EQ(made.name, "direct");
        EXPECT_EQ(find_step<GroupedGemmPlan>(made, "multiply")->name, "sm90_ragged_rows");
        EXPECT_EQ(find_step<GroupedGemmPlan>(made, "dx")->name, "sm90_ragged_rows");
        EXPECT_EQ(find_step<GroupedGemmPlan>(made, "dw")->name, "sm90_ragged_contraction");
        EXPECT_EQ(find_step<BiasGradPlan>(made, "dbias")->name, "cuda_bias_grad");
        EXPECT_TRUE(made.exact);
      }
  const GroupedMlpPlan made = plan(mlp("bf16"), hopper().device);
  EXPECT_EQ(made.name, "fused");
  EXPECT_EQ(find_step<GroupedGemmPlan>(made.fc1, "multiply")->name, "sm90_gated_rows");
  EXPECT_EQ(find_step<ActivationPlan>(made, "activation backward")->name, "cuda_activation");
  EXPECT_EQ(plan(test::each_linear(test::mlp_row("bf16"),
                                   [](GroupedLinearProblem& l) {
                                     l.n = l.n == 10 ? 16 : l.n;
                                     l.k = l.k == 10 ? 16 : l.k;
                                   }),
                 hopper().device)
                .name,
            "grouped_mlp");
}

TEST(LayerPlan, OfAnExpertLayerNamesTheKernels) {
  const auto p = parse_moe_problem("moe T=20 top_k=2 H=16 F=32 E=3 recipe=bf16 bias2=yes");
  const MoePlan made = plan(p, hopper().device);
  for (const char* step : {"permute", "combine", "combine backward", "permute backward"})
    EXPECT_EQ(find_step<PermutePlan>(made, step)->name, "cuda_permute") << step;
  for (const char* step : {"route", "route backward"})
    EXPECT_EQ(find_step<RoutingPlan>(made, step)->name, "cuda_routing") << step;
  EXPECT_TRUE(find_step<RoutingPlan>(made, "route")->problem.map);
  EXPECT_EQ(find_step<GroupedGemmPlan>(made.mlp.fc1, "multiply")->name, "sm90_gated_rows");
  EXPECT_TRUE(made.exact);
  MoeProblem shares = p;
  shares.shared_features = 64;
  const MoePlan shared = plan(shares, hopper().device);
  EXPECT_EQ(find_step<OffsetsPlan>(shared, "shared offsets")->name, "cuda_offsets");
  EXPECT_EQ(find_step<PermutePlan>(shared, "combine")->name, "cuda_permute");
  EXPECT_EQ(find_step<GroupedGemmPlan>(shared.shared.fc1, "multiply")->name, "sm90_gated_rows");
}

TEST(LayerPlan, OfAQuantisedRecipeDecodesAndSaysWhyItMust) {
  for (const char* recipe : {"fp8_tensor", "fp8_block", "mxfp8", "nvfp4", "mxfp4"}) {
    const GroupedLinearPlan made = plan(linear(recipe), hopper().device);
    EXPECT_EQ(made.name, "decoded") << recipe;
    EXPECT_EQ(find_step<GroupedGemmPlan>(made, "multiply")->name, "sm90_ragged_rows");
    EXPECT_NE(made.refusals.back().why.find("no implementation on sm_90 for 'grouped_gemm "),
              std::string::npos)
        << made.refusals.back().why;
    EXPECT_EQ(plan(mlp(recipe), hopper().device).fc2.name, "decoded") << recipe;
  }
}

/// What a run of a layer with host memory says that a launch could not have got to.
template <class Case, class Change>
std::string said(const auto& problem, bool backwards, Change&& change) {
  Case c(problem, kCounts, 1, hopper());
  auto args = c.args();
  change(args);
  const test::OwnedWorkspace w(
      std::max(c.plan.memory.forward_workspace_bytes, c.plan.memory.backward_workspace_bytes));
  const std::string message = invalid([&] {
    if (backwards)
      backward(c.plan, args, w.get(), {});
    else
      forward(c.plan, args, w.get(), {});
  });
  EXPECT_EQ(c.damage(), "");
  return message.substr(0, message.find(" at "));
}

/// The view, four elements behind its place.
TensorView shifted(TensorView v) {
  v.data = static_cast<char*>(v.data) + bytes_for(v.dtype, 4);
  return v;
}

TEST(LayerPlan, RefusesAddressesOfAnyProductBeforeTheFirstOne) {
  EXPECT_EQ(said<MlpCase>(mlp("bf16"), false, [](GroupedMlpArgs& a) { a.y = shifted(a.y); }),
            "grouped_gemm: y is bf16[20, 16] strides (56, 1)");
  GroupedMlpProblem frozen = mlp("bf16");
  frozen.dgrad = frozen.wgrad1 = frozen.wgrad2 = frozen.dbias = frozen.dprob = false;
  const std::string no_z = said<MlpCase>(frozen, false, [](GroupedMlpArgs& a) { a.z = a.y; });
  EXPECT_EQ(no_z.substr(0, no_z.find(" [")),
            "grouped_mlp: z is given, must be null; the plan makes none; the route unfused does");
  EXPECT_EQ(said<MlpCase>(mlp("bf16"), true, [](GroupedMlpArgs& a) { a.dx = shifted(a.dx); }),
            "grouped_gemm: dx is bf16[20, 16] strides (72, 1)");
  EXPECT_EQ(
      said<MlpCase>(mlp("bf16"), true, [](GroupedMlpArgs& a) { a.fc1.dw = shifted(a.fc1.dw); }),
      "grouped_gemm: dw is bf16[3, 64, 16]");
  EXPECT_EQ(
      said<LinearCase>(linear("bf16"), true,
                       [](GroupedLinearArgs& a) { a.parameters.dw = shifted(a.parameters.dw); }),
      "grouped_gemm: dw is bf16[3, 24, 16]");
}

TEST(PermutePlan, OfSeveralRanksIsNotForAGpu) {
  const std::string error = test::unsupported(
      [] { plan(PermuteProblem{.hidden = 1, .ranks = 2}, parse_device("sm_90")); });
  EXPECT_NE(error.find("cuda_permute: takes the memory of one rank"), std::string::npos) << error;
}

}  // namespace
