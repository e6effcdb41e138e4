#pragma once
#include <vector>

#include "cadre/grouped_mlp.h"
#include "cadre/moe.h"

// Which passes of a recipe are worth what quantising for them takes.
namespace cadre::layers {

/// A recipe, and why the plan says another one than the problem, where it does.
struct PayingRecipe {
  Recipe recipe;
  std::vector<Refusal> refusals;
};

/// Products of codes that `sm90_fp8_rows` takes become products of 16 bits where quantising takes
/// longer than they save, and fprop and dgrad are asked apart. Others stay: of pinned recipes, of
/// copies that the caller makes, of decoded operands, which are slower than bf16 anywhere, and of
/// problems so small that it hardly matters. Both linears of an MLP are asked together.
PayingRecipe paying_recipe(const GroupedLinearProblem&, const Device&);
PayingRecipe paying_recipe(const GroupedMlpProblem&, const Device&);
PayingRecipe paying_recipe(const MoeProblem&, const Device&);

/// What `plan_problem` makes of the problem in that recipe, unless a route is asked for by name.
template <class Problem>
auto plan_paying(Problem problem, const Device& device, std::string_view only,
                 auto&& plan_problem) {
  if (!only.empty()) return plan_problem(problem);
  PayingRecipe paying = paying_recipe(problem, device);
  problem.recipe = paying.recipe;
  auto plan = plan_problem(problem);
  plan.refusals.insert(plan.refusals.begin(), paying.refusals.begin(), paying.refusals.end());
  return plan;
}

}  // namespace cadre::layers
