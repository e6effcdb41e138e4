#include "apps/train/plans.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "apps/train/cross_entropy.h"
#include "cadre/error.h"

namespace cadre::train {
namespace {

MoeProblem expert_problem(const NetworkShape& shape) {
  const bool train = shape.mode == Mode::kTrain;
  MoeProblem p;
  p.tokens = shape.rows;
  p.top_k = static_cast<int>(shape.settings.top_k);
  p.hidden = shape.settings.hidden;
  p.features = shape.settings.features;
  p.experts = static_cast<int>(shape.settings.experts);
  p.recipe = shape.recipe;
  p.dtype = row_type(shape.recipe);
  p.parameters.weight = p.parameters.dw = DType::kF32;
  p.normalize = true;
  p.dgrad = p.dlogits = p.wgrad1 = p.wgrad2 = train;
  p.options.cache_weights = !train;
  return p;
}

BlockPlans plan_block(const NetworkShape& shape, const Device& device) {
  const Settings& s = shape.settings;
  const bool train = shape.mode == Mode::kTrain;
  return {.router = plan_dense({shape.rows, s.experts, s.hidden, DType::kF32, train}, device),
          .experts = plan(expert_problem(shape), device)};
}

/// Collects the implementations of every operation.
class PlanNames {
 public:
  template <class Problem>
  void add(const Plan<Problem>& plan) {
    const std::string problem = to_string(plan.problem);
    names_[problem.substr(0, problem.find(' '))].insert(plan.name);
  }
  template <class Problem>
  void add(const std::optional<Plan<Problem>>& plan) {
    if (plan) add(*plan);
  }
  void add(const DensePlans& p) { add(p.fprop), add(p.dgrad), add(p.wgrad); }
  void add(const PartPhase&) {}
  void add(const ScaleProduct&) {}
  void add_steps(const LayerPlan& layer) {
    for (const LayerStep& step : layer.steps) {
      std::visit([&](const auto& plan) { add(plan); }, step.plan);
    }
  }
  void add(const MoePlan& p) {
    add_steps(p), add_steps(p.mlp), add_steps(p.mlp.fc1), add_steps(p.mlp.fc2);
  }

  std::string joined() const {
    std::string words;
    for (const auto& [operation, names] : names_) {
      words += text(words.empty() ? "" : ", ", operation);
      for (const std::string_view name : names) words += text(' ', name);
    }
    return words;
  }

 private:
  std::map<std::string, std::set<std::string_view>> names_;
};

}  // namespace

DType row_type(const Recipe& recipe) {
  return recipe == parse_recipe("f32") ? DType::kF32 : DType::kBf16;
}

int64_t BlockPlans::workspace_bytes() const {
  return std::max({router.workspace_bytes(), experts.memory.forward_workspace_bytes,
                   experts.memory.backward_workspace_bytes});
}

int64_t NetworkPlans::workspace_bytes() const {
  return std::max(block.workspace_bytes(), head.workspace_bytes());
}

NetworkPlans plan_network(const NetworkShape& shape, const Device& device) {
  try {
    const bool train = shape.mode == Mode::kTrain;
    return {
        .shape = shape,
        .block = plan_block(shape, device),
        .head = plan_dense(
            {shape.rows, kSymbols, shape.settings.hidden, row_type(shape.recipe), train}, device)};
  } catch (const Unsupported& e) {
    throw Unsupported(text("train: recipe ", to_string(shape.recipe), " does not run on ",
                           to_string(device),
                           "; give --device cpu, or another recipe: ", e.what()));
  }
}

std::string implementations(const NetworkPlans& plans) {
  PlanNames names;
  names.add(plans.block.router), names.add(plans.head), names.add(plans.block.experts);
  return names.joined();
}

}  // namespace cadre::train
