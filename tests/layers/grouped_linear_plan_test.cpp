// What a grouped linear layer plans: its text, its steps, its memory.
#include <gtest/gtest.h>

#include "cadre/grouped_linear.h"
#include "tests/judge/errors.h"
#include "tests/layers/linear_case.h"

using namespace cadre;
using test::Counts;
using test::LinearCase;

namespace {

GroupedLinearProblem problem(std::string_view recipe) {
  GroupedLinearProblem p{.rows = 640, .n = 96, .k = 160, .experts = 5};
  p.recipe = parse_recipe(recipe);
  return p;
}
GroupedLinearPlan planned(const GroupedLinearProblem& p) { return plan(p, this_cpu()); }

/// What a quantise step makes; nothing if the plan has no such step.
QuantizeProblem quantizes(const GroupedLinearPlan& plan, std::string_view step) {
  const auto* found = find_step<QuantizePlan>(plan, step);
  return found ? found->problem : QuantizeProblem{};
}
/// Whether any of these is a step of the plan.
bool has(const GroupedLinearPlan& plan, std::initializer_list<std::string_view> steps) {
  return std::any_of(plan.steps.begin(), plan.steps.end(), [&](const LayerStep& step) {
    return std::find(steps.begin(), steps.end(), step.name) != steps.end();
  });
}

TEST(GroupedLinearText, PrintsWhatIsNotUsualAndParsesBack) {
  GroupedLinearProblem p = problem("nvfp4");
  EXPECT_EQ(to_string(p), "grouped_linear R=640 N=96 K=160 E=5 recipe=nvfp4");
  p.bias = true;
  p.parameters.dw = DType::kF32;
  p.options.accumulate = Accumulate::kPerExpert;
  p.options.deferred = true;
  EXPECT_EQ(to_string(p),
            "grouped_linear R=640 N=96 K=160 E=5 recipe=nvfp4 dw=f32 bias=yes "
            "accumulate=per_expert deferred=yes");
  EXPECT_EQ(parse_grouped_linear_problem(to_string(p)), p);
}

TEST(GroupedLinearText, EveryFieldParsesBack) {
  std::mt19937 random(1);
  const auto draw = [&](unsigned end) { return int(random() % end); };
  for (int i = 0; i < 300; ++i) {
    GroupedLinearProblem p{.rows = draw(99), .n = draw(99), .k = draw(99), .experts = draw(9)};
    p.recipe = recipe_list()[size_t(draw(8))].recipe;
    p.recipe.wgrad = recipe_list()[size_t(draw(8))].recipe.wgrad;
    for (DType* type : {&p.dtype, &p.parameters.weight, &p.parameters.bias, &p.parameters.dw,
                        &p.parameters.dbias})
      *type = DType(draw(3));
    for (bool* flag :
         {&p.parameters.discrete_weight, &p.parameters.discrete_bias, &p.parameters.discrete_dw,
          &p.bias, &p.bias_scale, &p.return_bias, &p.dgrad, &p.wgrad, &p.dbias, &p.options.deferred,
          &p.options.save_input, &p.options.cache_weights, &p.options.quantized_x,
          &p.options.quantized_w, &p.gather})
      *flag = draw(2);
    p.tokens = draw(99);
    p.top_k = draw(9);
    p.parameters.weight_major = Major(draw(2));
    p.options.accumulate = Accumulate(draw(4));
    p.options.accumulate_bias = Accumulate(draw(4));
    p.options.tail = Tail(draw(2));
    p.options.amax_eps = float(draw(3)) / 7;
    p.x_role = TensorRole(draw(5));
    p.dy_role = TensorRole(draw(5));
    p.options.unit_budget = draw(3);
    p.options.align = 1 << draw(6);
    EXPECT_EQ(parse_grouped_linear_problem(to_string(p)), p) << to_string(p);
  }
}

TEST(GroupedLinearPlan, PlainRecipesReadTheTensorsAsTheyAre) {
  const GroupedLinearPlan direct = planned(problem("bf16"));
  EXPECT_EQ(direct.name, "direct");
  EXPECT_FALSE(has(direct, {"quantize x", "quantize w", "quantize dy"}));
  EXPECT_EQ(direct.memory.saved_bytes + direct.memory.weight_cache_bytes, 0);
  // Only the scratch of the products.
  EXPECT_EQ(direct.memory.forward_workspace_bytes,
            find_step<GroupedGemmPlan>(direct, "multiply")->workspace_bytes);
}

TEST(GroupedLinearPlan, ARouteIsTakenOrSaysWhyNot) {
  const GroupedLinearPlan made = planned(problem("mxfp8"));
  ASSERT_EQ(made.refusals.size(), 1u);
  EXPECT_EQ(made.refusals[0].name, "direct");
  EXPECT_EQ(made.refusals[0].why, "w is copied into mxfp8");
  EXPECT_NE(explain(made).find("route quantized\n  not direct: w is copied into mxfp8\n"),
            std::string::npos);
  EXPECT_TRUE(planned(problem("bf16")).refusals.empty());
  EXPECT_EQ(plan(problem("bf16"), this_cpu(), "direct").name, "direct");

  GroupedLinearProblem p = problem("mxfp8,wgrad=bf16");
  p.parameters.weight = DType::kF32;
  p.recipe.fprop.rhs = p.recipe.dgrad.rhs = format(FormatKind::kF32);
  EXPECT_EQ(planned(p).refusals[0].why, "x is copied into mxfp8");
  p.recipe.fprop.lhs = format(FormatKind::kBf16);
  EXPECT_EQ(planned(p).refusals[0].why, "dy is copied into mxfp8");
}

TEST(GroupedLinearErrors, OfRoutes) {
  const auto refused = [](std::string_view recipe, std::string_view only) {
    return test::unsupported([&] { plan(problem(recipe), this_cpu(), only); });
  };
  const std::string none =
      "no implementation on cpu for 'grouped_linear R=640 N=96 K=160 E=5 recipe=";
  EXPECT_EQ(refused("mxfp8", "direct"), none + "mxfp8':\n  direct: w is copied into mxfp8");
  EXPECT_EQ(refused("bf16", "quantized"),
            none + "bf16':\n  quantized: every product reads its tensors as they are");
  EXPECT_EQ(refused("mxfp8", "decoded"),
            none + "mxfp8':\n  decoded: every product takes its operands as they are quantised");
  EXPECT_EQ(test::invalid([] { plan(problem("bf16"), this_cpu(), "fused"); }),
            "plan: route is 'fused', must be one of direct, quantized, sm90_packed_rows, "
            "sm90_fp8_rows, decoded "
            "[grouped_linear R=640 N=96 K=160 E=5 recipe=bf16]");
}

TEST(GroupedLinearPlan, MasterWeightsAreCastOnceForBothPasses) {
  GroupedLinearProblem p = problem("bf16");
  p.parameters.weight = DType::kF32;
  p.options.cache_weights = true;
  const GroupedLinearPlan made = planned(p);
  EXPECT_EQ(made.name, "quantized");
  EXPECT_FALSE(has(made, {"quantize x", "quantize dy"}));
  EXPECT_TRUE(quantizes(made, "quantize w").along_k);
  EXPECT_FALSE(quantizes(made, "quantize w").along_rows);
  EXPECT_EQ(made.memory.weight_cache_bytes, 5 * 96 * 160 * 2);
}

TEST(GroupedLinearPlan, SquareBlocksAndOneScaleAnExpertShareACopy) {
  for (const char* recipe : {"fp8_tensor", "fp8_block", "nvfp4"}) {
    GroupedLinearProblem p = problem(recipe);
    p.options.cache_weights = true;
    const GroupedLinearPlan made = planned(p);
    EXPECT_EQ(find_tensor(made, "w along rows"), nullptr) << recipe;
    EXPECT_FALSE(quantizes(made, "quantize w").along_rows) << recipe;
  }
  GroupedLinearProblem p = problem("mxfp8");
  p.options.cache_weights = true;
  const GroupedLinearPlan two = planned(p);
  EXPECT_NE(find_tensor(two, "w along rows")->offset, find_tensor(two, "w along K")->offset);
  EXPECT_TRUE(quantizes(planned(p), "quantize w").along_rows);

  // x of fp8_tensor: saved once, read by fprop and wgrad; of the others: two copies.
  const GroupedLinearPlan tensor = planned(problem("fp8_tensor"));
  EXPECT_EQ(find_tensor(tensor, "x along K")->place, Place::kSaved);
  EXPECT_FALSE(quantizes(tensor, "quantize x").along_rows);
  const GroupedLinearPlan block = planned(problem("fp8_block"));
  EXPECT_EQ(find_tensor(block, "x along K")->place, Place::kWorkspace);
  EXPECT_EQ(find_tensor(block, "x along rows")->place, Place::kSaved);
}

TEST(GroupedLinearPlan, KeepsWhatBackwardNeedsAndNoMore) {
  // mxfp8 along rows: a code each, and a scale byte for every 32 rows: [640 / 32 + 5, 160].
  const GroupedLinearPlan made = planned(problem("mxfp8"));
  EXPECT_EQ(made.memory.saved_bytes, 640 * 160 + 25 * 160 + (256 - 25 * 160 % 256) % 256);
  const auto parts = kept(made);
  ASSERT_EQ(parts.size(), 1u);
  EXPECT_EQ(parts[0].name, "x along rows");
  EXPECT_EQ(parts[0].place, Place::kSaved);
  EXPECT_DOUBLE_EQ(bytes_per_token(parts, 640), double(made.memory.saved_bytes) / 640);
  EXPECT_DOUBLE_EQ(bytes_per_token(parts, 640, 8), 8 * bytes_per_token(parts, 640));

  // bf16: x itself, which the caller keeps; with a scaled bias its scales too.
  GroupedLinearProblem scaled = problem("bf16");
  scaled.bias = scaled.bias_scale = true;
  EXPECT_DOUBLE_EQ(bytes_per_token(kept(planned(scaled)), 640), 160 * 2 + 4);
  EXPECT_EQ(kept(planned(scaled))[0].place, Place::kCaller);

  GroupedLinearProblem original = problem("mxfp8");
  original.options.save_input = true;
  EXPECT_EQ(planned(original).memory.saved_bytes, 0);
  EXPECT_DOUBLE_EQ(bytes_per_token(kept(planned(original)), 640), 160 * 2);
  EXPECT_EQ(bytes_per_token({}, 0), 0);
}

TEST(GroupedLinearPlan, FrozenPartsTakeNoStepAndNoMemory) {
  GroupedLinearProblem p = problem("mxfp8");
  p.wgrad = false;
  const GroupedLinearPlan frozen_weights = planned(p);
  EXPECT_FALSE(has(frozen_weights, {"dw"}));
  EXPECT_FALSE(quantizes(frozen_weights, "quantize x").along_rows);
  EXPECT_FALSE(quantizes(frozen_weights, "quantize dy").along_rows);
  EXPECT_EQ(frozen_weights.memory.saved_bytes, 0);
  EXPECT_TRUE(kept(frozen_weights).empty());

  p.wgrad = true;
  p.dgrad = false;
  p.options.cache_weights = true;
  const GroupedLinearPlan frozen_input = planned(p);
  EXPECT_FALSE(has(frozen_input, {"dx"}));
  EXPECT_FALSE(quantizes(frozen_input, "quantize w").along_rows);
  EXPECT_FALSE(quantizes(frozen_input, "quantize dy").along_k);

  p.wgrad = false;
  const GroupedLinearPlan inference = planned(p);
  EXPECT_FALSE(learns(inference));
  EXPECT_EQ(inference.memory.saved_bytes, 0);
}

TEST(GroupedLinearPlan, FrozenGradientsAreNotTouched) {
  const Counts counts{.rows = 9, .of = {4, 5}};
  for (const char* recipe : {"bf16", "mxfp8"}) {
    GroupedLinearProblem p{.rows = 9, .n = 6, .k = 7, .experts = 2};
    p.recipe = parse_recipe(recipe);
    p.bias = true;
    p.wgrad = false;
    LinearCase weights(p, counts, 1);
    weights.step();
    EXPECT_TRUE(weights.parameters.dw.untouched());
    EXPECT_FALSE(weights.parameters.dbias.untouched());
    p.wgrad = true;
    p.dgrad = p.dbias = false;
    LinearCase input(p, counts, 1);
    input.step();
    EXPECT_TRUE(input.dx.untouched(0, 9));
    EXPECT_TRUE(input.parameters.dbias.untouched());
    EXPECT_FALSE(input.parameters.dw.untouched());
  }
}

TEST(GroupedLinearPlan, ExplainsItsStepsAndItsMemory) {
  GroupedLinearProblem p = problem("mxfp8");
  p.bias = true;
  p.options.deferred = p.options.cache_weights = true;
  const std::string words = explain(planned(p));
  for (const char* part :
       {"grouped_linear R=640", "route quantized", "quantize w: ", "multiply: ", "quantize dy: ",
        "dx: ", "dbias: ", "dw, deferred: ", "x along K, w along K, bias -> y",
        "w -> w along K, w along rows", "dy along rows, x along rows -> dw", "weight cache: ",
        "pending from backward to wgrad: ", "kept for backward, of each row: x along rows "})
    EXPECT_NE(words.find(part), std::string::npos) << part << " in\n" << words;
}

}  // namespace
