// When the plan of a layer takes a pass in bf16 that its recipe quantises: on Hopper, where codes
// cost more than they save, and never where the numbers are the purpose. Needs no GPU.
#include <gtest/gtest.h>

#include "cadre/error.h"
#include "cadre/moe.h"
#include "cadre/sequential.h"

using namespace cadre;

namespace {

constexpr std::string_view kQwen = "R=65536 H=2048 F=768 E=128 prob=yes";
constexpr std::string_view kMixtral = "R=16384 H=4096 F=14336 E=8 prob=yes";

GroupedMlpPlan plan_of(std::string_view sizes, std::string_view recipe,
                       std::string_view device = "sm_90") {
  return plan(parse_grouped_mlp_problem(text("grouped_mlp ", sizes, " recipe=", recipe)),
              parse_device(device));
}
std::string recipe_of(const auto& plan) { return to_string(plan.problem.recipe); }

TEST(PayingRecipe, TakesPassesAsTheyAreWhereQuantisingCostsMore) {
  const GroupedMlpPlan qwen = plan_of(kQwen, "fp8_block,wgrad=bf16");
  EXPECT_EQ(recipe_of(qwen), "bf16");
  EXPECT_EQ(qwen.name, "fused");
  ASSERT_EQ(qwen.refusals.size(), 2u);
  EXPECT_EQ(qwen.refusals[0].name, "codes in fprop");
  // x and h, 3 bytes each, and 3 of each weight; 6 R H F of FLOP over 590.
  EXPECT_EQ(qwen.refusals[0].why,
            "quantising takes as long as moving 2365 MB, and products of codes save 1048; bf16 is "
            "faster, or say recipe=...,pinned");
  EXPECT_EQ(qwen.refusals[1].name, "codes in dgrad");
  // dout 3 bytes, dz 1, and 3 of each weight.
  EXPECT_NE(qwen.refusals[1].why.find("moving 2315 MB"), std::string::npos) << qwen.refusals[1].why;
  EXPECT_NE(explain(qwen).find("\n  not codes in fprop: quantising takes"), std::string::npos);

  const GroupedMlpPlan mixtral = plan_of(kMixtral, "fp8_block,wgrad=bf16");
  EXPECT_EQ(recipe_of(mixtral), "fp8_block,wgrad=bf16");
  EXPECT_EQ(mixtral.name, "codes");
}

TEST(PayingRecipe, LeavesTheErrorOfTheLayerToIt) {
  for (const std::string_view device : {"sm_90", "cpu"}) try {
      (void)plan_of("R=40 H=32 F=48 E=3 weight_major=column", "mxfp8", device);
      FAIL() << "taken";
    } catch (const std::invalid_argument& e) {
      EXPECT_EQ(std::string_view(e.what()).find(
                    "grouped_linear: weight_major is column, must be row; the recipe copies"),
                0u)
          << e.what();
    }
}

TEST(PayingRecipe, WeighsCachedWeightsAsNothing) {
  EXPECT_EQ(plan_of(text(kQwen, " cache_weights=yes"), "fp8_block,wgrad=bf16").name, "codes");
  // Rows of 1536 are quantised for products of 256 features.
  EXPECT_EQ(
      recipe_of(plan_of("R=196608 H=1536 F=256 E=128 cache_weights=yes", "fp8_block,wgrad=bf16")),
      "bf16");
  // Of few rows codes of cached weights save the bytes of weights.
  EXPECT_EQ(
      plan_of("R=32768 H=1536 F=64 E=1024 cache_weights=yes dgrad=no", "fp8_block,wgrad=bf16").name,
      "codes");
}

TEST(PayingRecipe, WeighsEachPassAlone) {
  // dy has eight times the columns of x.
  const GroupedLinearPlan linear =
      plan(parse_grouped_linear_problem(
               "grouped_linear R=65536 N=4096 K=512 E=8 recipe=fp8_block,wgrad=bf16"),
           parse_device("sm_90"));
  EXPECT_EQ(recipe_of(linear), "bf16,fprop=fp8_block");
  EXPECT_EQ(linear.refusals[0].name, "codes in dgrad");
  EXPECT_EQ(linear.name, "sm90_fp8_rows");
}

TEST(PayingRecipe, KeepsWhatItMayNotChange) {
  for (const auto& [sizes, recipe, device] :
       {std::array<std::string_view, 3>{kQwen, "fp8_block,wgrad=bf16,pinned", "sm_90"},
        {kQwen, "fp8_block,wgrad=bf16", "sm_80"},
        {kQwen, "fp8_block,wgrad=bf16", "cpu"},
        {kQwen, "mxfp8", "sm_90"},
        {kQwen, "nvfp4", "sm_90"},
        {"R=65536 H=2048 F=768 E=128 weight=f32 dw=f32", "fp8_block,wgrad=bf16", "sm_90"},
        {"R=65536 H=2048 F=768 E=128 given_x_along_k=yes", "fp8_block,wgrad=bf16", "sm_90"},
        {"R=64 H=2048 F=768 E=1", "fp8_block,wgrad=bf16", "sm_90"}})
    EXPECT_EQ(recipe_of(plan_of(sizes, recipe, device)), recipe) << sizes << " on " << device;
  const auto qwen =
      parse_grouped_mlp_problem(text("grouped_mlp ", kQwen, " recipe=fp8_block,wgrad=bf16"));
  EXPECT_EQ(recipe_of(plan(qwen, parse_device("sm_90"), "codes")), "fp8_block,wgrad=bf16");
}

TEST(PayingRecipe, FormatsWithAScaleAnExpertReadTheirSourceTwice) {
  const auto why = [](std::string_view recipe) {
    const auto plan = plan_of(kQwen, recipe);
    return plan.refusals.empty() ? "" : plan.refusals[0].why;
  };
  EXPECT_NE(why("fp8_tensor").find("moving 3942 MB"), std::string::npos) << why("fp8_tensor");
}

TEST(PayingRecipe, IsThatOfEveryLayer) {
  const auto moe = plan(parse_moe_problem("moe T=8192 top_k=8 H=2048 F=768 E=128 shared_F=768 "
                                          "recipe=fp8_block,wgrad=bf16"),
                        parse_device("sm_90"));
  EXPECT_EQ(recipe_of(moe), "bf16");
  EXPECT_EQ(recipe_of(moe.mlp), "bf16");
  EXPECT_EQ(recipe_of(moe.shared), "bf16");
  const auto forward_alone =
      plan(parse_moe_problem("moe T=8192 top_k=8 H=2048 F=768 E=128 recipe=fp8_block,wgrad=bf16 "
                             "dgrad=no dlogits=no wgrad1=no wgrad2=no"),
           parse_device("sm_90"));
  EXPECT_EQ(recipe_of(forward_alone), "bf16,dgrad=fp8_block");
  const auto pinned = plan(parse_moe_problem("moe T=8192 top_k=8 H=2048 F=768 E=128 shared_F=768 "
                                             "recipe=fp8_block,wgrad=bf16,pinned"),
                           parse_device("sm_90"));
  EXPECT_EQ(recipe_of(pinned.mlp), "fp8_block,wgrad=bf16,pinned");
  EXPECT_EQ(recipe_of(pinned.shared), "fp8_block,wgrad=bf16,pinned");
  const auto row =
      plan(parse_sequential_problem("sequential | grouped_linear R=65536 N=1536 K=2048 E=128 "
                                    "recipe=fp8_block,wgrad=bf16"),
           parse_device("sm_90"));
  EXPECT_NE(explain(row).find("not codes in fprop"), std::string::npos) << explain(row);
}

}  // namespace
