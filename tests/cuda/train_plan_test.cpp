// cadre train takes every recipe to a GPU, and says what an old one lacks. Needs no GPU.
#include <gtest/gtest.h>

#include "apps/train/plans.h"
#include "apps/train/session.h"
#include "cadre/recipe.h"
#include "tests/apps/train/folder.h"
#include "tests/judge/errors.h"

namespace cadre::train {
namespace {

TEST(TrainPlan, TakesEveryRecipeToAGpu) {
  for (const RecipeInfo& row : recipe_list()) {
    const NetworkShape shape{Settings{}, row.recipe, 1024};
    for (const char* device : {"sm_80", "sm_90"})
      EXPECT_NE(implementations(plan_network(shape, parse_device(device))).find("grouped_gemm "),
                std::string::npos)
          << row.name;
  }
}

TEST(TrainPlan, RefusesARecipeWithTheReasonsAndTheRemedy) {
  const NetworkShape shape{Settings{}, parse_recipe("fp8_block"), 1024};
  const std::string what =
      test::unsupported([&] { plan_network(shape, {.kind = DeviceKind::kCuda, .sm = 75}); });
  EXPECT_EQ(what.find("train: recipe fp8_block does not run on sm_75; give --device cpu, or "), 0u)
      << what;
  EXPECT_NE(what.find("no implementation on sm_75 for "), what.npos) << what;
}

TEST(TrainPlan, RefusesBeforeAnyWork) {
  const test::Folder folder;
  Request request;
  request.recipes = {"fp8_block"};
  request.paths = {folder / "missing.txt"};
  request.out = folder / "out";
  request.device = {.kind = DeviceKind::kCuda, .sm = 75};
  std::ostringstream out;
  const std::string what = test::unsupported([&] { run_session(request, false, out, {}); });
  EXPECT_NE(what.find("recipe fp8_block does not run on sm_75"), what.npos) << what;
  EXPECT_EQ(out.str(), "");
  EXPECT_FALSE(std::filesystem::exists(request.out));
}

}  // namespace
}  // namespace cadre::train
