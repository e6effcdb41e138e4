// When the expert layer gathers its rows, and what it plans then. Its bits are for moe_test.
#include <gtest/gtest.h>

#include "cadre/error.h"
#include "layers/moe.h"
#include "layers/route.h"
#include "tests/judge/errors.h"

using namespace cadre;

namespace {

constexpr int64_t kTokens = 64, kTopK = 5, kRows = kTokens * kTopK;

MoeProblem problem() {
  MoeProblem p{.tokens = kTokens, .top_k = kTopK, .hidden = 96, .features = 64, .experts = 6};
  p.recipe = parse_recipe("bf16");
  return p;
}
MoePlan planned(const MoeProblem& p) { return plan(p, this_cpu()); }
bool has(const LayerPlan& plan, std::string_view step) {
  return std::any_of(plan.steps.begin(), plan.steps.end(),
                     [&](const LayerStep& own) { return own.name == step; });
}
std::vector<std::string_view> kept_names(const MoePlan& plan) {
  std::vector<std::string_view> names;
  for (const KeptPart& part : kept(plan)) names.push_back(part.name);
  return names;
}

/// What a route says of a problem that it does not take.
std::string refusal(const MoeProblem& p, const Device& device) {
  return plan(p, device).refusals.at(0).why;
}

TEST(MoeGather, GathersNothingOnTheCpu) {
  MoeProblem p = problem();
  EXPECT_EQ(planned(p).refusals.at(0).name, "gathered");
  EXPECT_EQ(refusal(p, this_cpu()), "is for GPUs; on the CPU no product gathers rows");
  EXPECT_EQ(test::unsupported([&] { plan(p, this_cpu(), "gathered"); }),
            "no implementation on cpu for 'moe T=64 top_k=5 H=96 F=64 E=6 act=swiglu recipe=bf16':"
            "\n  gathered: is for GPUs; on the CPU no product gathers rows");
}

TEST(MoeGather, GathersWhatItQuantisesOnEveryDevice) {
  for (const char* recipe : {"fp8_block", "fp8_tensor", "mxfp8", "nvfp4"}) {
    MoeProblem p = problem();
    p.recipe = parse_recipe(recipe);
    p.shared_features = 128;
    const MoePlan made = planned(p), copied = plan(p, this_cpu(), "permuted");
    EXPECT_EQ(made.name, "gathered") << recipe;
    for (const char* step : {"permute", "permute again"}) EXPECT_FALSE(has(made, step)) << recipe;
    EXPECT_TRUE(find_step<QuantizePlan>(made.mlp.fc1, "quantize x")->problem.gather);
    EXPECT_FALSE(find_step<QuantizePlan>(made.mlp.fc2, "quantize x")->problem.gather);
    EXPECT_FALSE(find_step<QuantizePlan>(made.shared.fc1, "quantize x")->problem.gather);
    EXPECT_EQ(find_tensor(made, "rows"), nullptr);
    EXPECT_EQ(kept_names(made), kept_names(copied));
    EXPECT_EQ(made.memory.saved_bytes, copied.memory.saved_bytes);
    EXPECT_LE(made.memory.forward_workspace_bytes, copied.memory.forward_workspace_bytes);
  }
}

TEST(MoeGather, WritesRowsForADwThatReadsThem) {
  MoeProblem p = problem();
  const std::string keeps =
      "keep_rows is yes, and dw of fc1 is of the rows, which forward does not write";
  const auto expect_permuted_unless_rows_are_dropped = [&](MoeProblem of, bool again) {
    EXPECT_EQ(planned(of).name, "permuted");
    EXPECT_EQ(refusal(of, this_cpu()), keeps);
    of.keep_rows = false;
    EXPECT_EQ(planned(of).name, "gathered");
    EXPECT_EQ(has(planned(of), "permute again"), again);
    of.keep_rows = true;
    of.wgrad1 = false;
    EXPECT_EQ(planned(of).name, "gathered");
    EXPECT_FALSE(has(planned(of), "permute again"));
  };
  p.recipe = parse_recipe("fp8_block,wgrad=bf16");
  expect_permuted_unless_rows_are_dropped(p, true);
  p.recipe = parse_recipe("mxfp8");  // whose tokens are quantised again, as they are gathered
  p.options.save_input = true;
  expect_permuted_unless_rows_are_dropped(p, false);
}

TEST(MoeGather, GathersForNarrowProductsUnlessItIsNamed) {
  MoeProblem p = problem();
  p.tokens = 615;
  p.features = 384;
  EXPECT_EQ(layers::why_permuted_is_faster(p, this_cpu()), "");
  p.tokens = 614;
  EXPECT_EQ(layers::why_permuted_is_faster(p, this_cpu()),
            "experts have 511 rows in the mean, and a product gathers 128 for a tile; the least is "
            "512, or name the route");
  p.tokens = 615;
  p.features = 385;
  EXPECT_EQ(layers::why_permuted_is_faster(p, this_cpu()),
            "a product of 770 columns is slower than a copy and the plain product; the most is "
            "768, or name the route");
  p.recipe = parse_recipe("mxfp8");  // no product gathers
  EXPECT_EQ(layers::why_permuted_is_faster(p, this_cpu()), "");
  p.recipe = parse_recipe("bf16");
  p.activation = ActivationKind::kRelu;
  EXPECT_EQ(layers::why_permuted_is_faster(p, this_cpu()), "");

  const auto planned_as = [](const MoeProblem& of, const Device& device) {
    MoePlan made;
    made.problem = of;
    made.device = device;
    return made;
  };
  const layers::Route<MoeProblem, MoePlan> routes[] = {
      {.name = "slow",
       .refuses = layers::takes_all,
       .plan = planned_as,
       .why_slow = [](const MoeProblem& of, const Device&) -> std::string {
         return of.tokens > 9 ? "is slow with many tokens" : "";
       }},
      {.name = "other", .refuses = layers::takes_all, .plan = planned_as}};
  const auto taken = [&](std::string_view only) {
    return layers::choose<MoePlan, MoeProblem>(routes, p, this_cpu(), only);
  };
  EXPECT_EQ(taken({}).name, "other");
  EXPECT_EQ(taken({}).refusals.at(0).why, "is slow with many tokens");
  EXPECT_EQ(taken("slow").name, "slow");
  p.tokens = 9;
  EXPECT_EQ(taken({}).name, "slow");
}

TEST(MoeGather, OfADeviceWithoutProductsSaysWhyOfEachRoute) {
  MoeProblem p = problem();
  p.keep_rows = false;
  const std::string why =
      test::unsupported([&] { plan(p, {.kind = DeviceKind::kCuda, .sm = 75}); });
  for (const char* route : {"for 'moe ", "\n  gathered: ", "\n  permuted: "})
    EXPECT_NE(why.find(route), std::string::npos) << why;
}

TEST(MoeGather, GatheredMakesNoRowsInForward) {
  MoeProblem p = problem();
  p.keep_rows = false;
  p.shared_features = 128;
  const MoePlan copied = planned(p), made = layers::plan_gathered(p, this_cpu());
  EXPECT_FALSE(has(made, "permute"));
  EXPECT_TRUE(has(made, "permute again"));
  EXPECT_EQ(find_tensor(made, "rows"), nullptr);
  for (const MoePlan* plan : {&made, &copied})
    EXPECT_EQ(
        find_step<RoutingPlan>(*plan, "route")->problem,
        parse_routing_problem("routing forward softmax T=64 E=6 top_k=5 map=yes row_prob=yes"));
  EXPECT_EQ(kept_names(made), kept_names(copied));
  EXPECT_EQ(made.memory.saved_bytes, copied.memory.saved_bytes);
  EXPECT_EQ(made.memory.backward_workspace_bytes, copied.memory.backward_workspace_bytes);
  const std::string words = explain(made);
  for (const char* part :
       {"logits -> experts, prob, scores, offsets, row_of, slot_of, prob of rows\n",
        "x, offsets, prob of rows, slot_of -> y of rows",
        "experts: grouped_mlp R=320 H=96 F=64 E=6 act=swiglu recipe=bf16 prob=yes gather=yes T=64 "
        "top_k=5",
        "shared expert: grouped_mlp R=64 H=96 F=128 E=1 act=swiglu recipe=bf16\n"})
    EXPECT_NE(words.find(part), std::string::npos) << part << " in\n" << words;
  // y of the rows, which the copy's rows would lie under, and what the product copies here.
  const int64_t own = find_tensor(made, "y of rows")->layout.bytes;
  EXPECT_LT(made.copies_bytes[size_t(Phase::kForward)], own + 1024);
}

}  // namespace
