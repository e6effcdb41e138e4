// A grouped linear layer against its formulas in double, and against its operations put together by
// hand, bit for bit.
#include "cadre/grouped_linear.h"

#include <gtest/gtest.h>

#include "tests/layers/linear_case.h"
#include "tests/layers/linear_composition.h"
#include "tests/layers/linear_model.h"
#include "tests/layers/random_layers.h"

using namespace cadre;
using test::Counts;
using test::first_difference;
using test::LinearCase;
using test::LinearResult;

namespace {

const char* const kRecipes[] = {
    "f32",
    "bf16",
    "f16",
    "fp8_tensor",
    "fp8_block",
    "mxfp8",
    "nvfp4",
    "mxfp4",
    "mxfp8,fprop=mxfp8*mxfp8:2d,dgrad=mxfp8*mxfp8:2d",
    "nvfp4,wgrad=bf16",
    "fp8_block,dgrad=bf16",
    "bf16,wgrad=fp8_tensor",
    "fp8_block,fprop=fp8_block:2d*fp8_block:2d,wgrad=fp8_block*fp8_block:2d",
};

/// A problem with every option drawn from `seed`.
GroupedLinearProblem random_problem(const Counts& counts, unsigned seed) {
  constexpr int64_t kWidths[] = {1, 6, 7, 18, 20, 33, 40};
  return test::random_linear(counts, seed, kWidths);
}

/// Few rows in total, since a reference multiplies them.
template <class Work>
void for_counts(int draws, unsigned seed, Work&& work) {
  test::for_random_counts(draws, seed, [&](const Counts& counts) {
    if (counts.rows <= 200 && counts.experts() <= 128) work(counts);
  });
}

TEST(GroupedLinear, PlainRecipesAreTheirFormulasWithinTheBound) {
  unsigned seed = 0;
  for_counts(300, 1, [&](const Counts& counts) {
    GroupedLinearProblem p = random_problem(counts, ++seed);
    p.recipe = recipe_list()[seed % 3].recipe;
    const bool own_w = p.recipe.fprop.rhs.element == p.parameters.weight;
    if (own_w && seed % 2) p.parameters.weight_major = Major::kColumn;
    const LinearCase before(p, counts, seed);
    LinearCase after(p, counts, seed);
    after.step();
    test::LinearModel(before, after).check();
  });
}

TEST(GroupedLinear, EveryRecipeIsItsOperationsBitForBit) {
  unsigned seed = 0;
  for_counts(180, 2, [&](const Counts& counts) {
    GroupedLinearProblem p = random_problem(counts, ++seed + 500);
    p.recipe = parse_recipe(kRecipes[seed % std::size(kRecipes)]);
    p.return_bias = false;
    p.options.amax_eps = seed % 2 ? 0.25f : 0;
    LinearCase want(p, counts, seed), got(p, counts, seed);
    test::LinearComposition(want).run();
    got.step();
    EXPECT_EQ(first_difference(LinearResult(got), LinearResult(want)), "") << to_string(p);
    EXPECT_EQ(got.damage(), "") << to_string(p);
  });
}

TEST(GroupedLinear, MoreExpertsThan64WithDiscreteEverything) {
  GroupedLinearProblem p{.rows = 500, .n = 3, .k = 5, .experts = 384};
  p.recipe = parse_recipe("f32");
  p.dtype = DType::kF32;
  p.parameters = {.weight = DType::kF32, .dw = DType::kF32};
  p.parameters.discrete_weight = p.parameters.discrete_bias = p.parameters.discrete_dw = true;
  p.bias = true;
  std::mt19937 random(3);
  Counts counts = test::random_counts(random, test::CountsKind::kSkewed, 384, 1);
  p.rows = counts.rows;
  const LinearCase before(p, counts, 4);
  LinearCase after(p, counts, 4);
  after.step();
  test::LinearModel(before, after).check();
}

/// Two problems that differ in how they run, and agree in every bit of what they compute.
struct Variant {
  const char* name;
  void (*change)(GroupedLinearProblem&);
};
const Variant kVariants[] = {
    {"deferred", [](GroupedLinearProblem& p) { p.options.deferred = true; }},
    {"cache_weights", [](GroupedLinearProblem& p) { p.options.cache_weights = true; }},
    {"save_input", [](GroupedLinearProblem& p) { p.options.save_input = true; }},
    {"deferred save_input",
     [](GroupedLinearProblem& p) { p.options.deferred = p.options.save_input = true; }},
    {"discrete weights", [](GroupedLinearProblem& p) { p.parameters.discrete_weight = true; }},
    {"discrete dw", [](GroupedLinearProblem& p) { p.parameters.discrete_dw = true; }},
    {"discrete biases", [](GroupedLinearProblem& p) { p.parameters.discrete_bias = true; }},
    {"all of it", [](GroupedLinearProblem& p) {
       p.options.deferred = p.options.cache_weights = p.options.save_input = true;
       p.parameters.discrete_weight = p.parameters.discrete_dw = true;
       p.parameters.discrete_bias = true;
     }}};

TEST(GroupedLinear, HowItRunsChangesNoBit) {
  unsigned seed = 0;
  for (const char* recipe : kRecipes) {
    const Counts counts{.rows = 75, .of = {17, 0, 33, 1, 20}};
    GroupedLinearProblem p{.rows = 75, .n = 20, .k = 34, .experts = 5};
    p.recipe = parse_recipe(recipe);
    p.bias = p.bias_scale = true;
    p.parameters.dw = DType::kF32;
    p.options.accumulate = Accumulate::kPerExpert;
    ++seed;
    LinearCase want(p, counts, seed);
    want.step();
    for (const Variant& variant : kVariants) {
      GroupedLinearProblem other = p;
      variant.change(other);
      LinearCase got(other, counts, seed);
      got.step();
      EXPECT_EQ(first_difference(LinearResult(got), LinearResult(want)), "")
          << variant.name << " of " << to_string(p);
    }
  }
}

TEST(GroupedLinear, FollowsTheCountsFromRunToRun) {
  GroupedLinearProblem p{.rows = 60, .n = 9, .k = 16, .experts = 4};
  p.recipe = parse_recipe("mxfp8");
  p.options.deferred = true;
  const Counts first{.rows = 60, .of = {10, 20, 0, 25}}, second{.rows = 60, .of = {0, 3, 40, 2}};
  LinearCase replayed(p, first, 5);
  replayed.step();
  LinearCase fresh(p, second, 6);
  fresh.step();

  // The same plan and the same memory, other counts and other data.
  replayed.counts = second;
  replayed.offsets = fresh.offsets;
  replayed.x = fresh.x;
  replayed.dy = fresh.dy;
  replayed.parameters = test::Parameters();
  std::mt19937 random(6);
  replayed.parameters =
      test::Parameters({.layout = p.parameters, .experts = 4, .n = p.n, .k = p.k}, random);
  replayed.clear();
  replayed.step();
  EXPECT_EQ(first_difference(LinearResult(replayed), LinearResult(fresh)), "");
}

TEST(GroupedLinear, ACacheIsUsedUntilItIsRefreshed) {
  const Counts counts{.rows = 40, .of = {12, 0, 28}};
  for (const char* recipe : {"fp8_tensor", "fp8_block", "mxfp8", "nvfp4", "mxfp4"}) {
    GroupedLinearProblem p{.rows = 40, .n = 17, .k = 33, .experts = 3};
    p.recipe = parse_recipe(recipe);
    p.options.cache_weights = true;
    LinearCase c(p, counts, 7);
    c.step();
    const LinearResult first(c);

    std::mt19937 random(8);
    c.parameters.w.fill(random, 3);
    c.refresh_weights = false;
    c.clear();
    c.step();
    EXPECT_EQ(first_difference(LinearResult(c), first), "") << recipe;

    c.refresh_weights = true;
    c.clear();
    c.step();
    EXPECT_NE(first_difference(LinearResult(c).y, first.y), "") << recipe;
    EXPECT_NE(first_difference(LinearResult(c).dx, first.dx), "") << recipe;
  }
}

TEST(GroupedLinear, ReturnedBiasIsNeitherAddedNorDifferentiated) {
  const Counts counts{.rows = 10, .of = {4, 6}};
  GroupedLinearProblem p{.rows = 10, .n = 5, .k = 6, .experts = 2};
  LinearCase without(p, counts, 9);
  p.bias = p.return_bias = true;
  LinearCase returned(p, counts, 9);
  without.step();
  returned.step();
  EXPECT_EQ(first_difference(LinearResult(returned).y, LinearResult(without).y), "");
  EXPECT_TRUE(returned.parameters.dbias.untouched());
}

}  // namespace
