#include "apps/train/plans.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "apps/train/cross_entropy.h"
#include "cadre/error.h"

namespace cadre::train {
namespace {

RoutingProblem routing_problem(const NetworkShape& shape, bool backward) {
  RoutingProblem p;
  p.backward = backward;
  p.tokens = shape.rows;
  p.experts = static_cast<int>(shape.settings.experts);
  p.top_k = static_cast<int>(shape.settings.top_k);
  p.normalize = true;
  return p;
}

OffsetsProblem offsets_problem(const NetworkShape& shape) {
  OffsetsProblem p;
  p.source = OffsetsSource::kRouting;
  p.rows = shape.rows * shape.settings.top_k;
  p.experts = static_cast<int>(shape.settings.experts);
  p.tokens = shape.rows;
  p.top_k = static_cast<int>(shape.settings.top_k);
  return p;
}

PermuteProblem permute_problem(const NetworkShape& shape, PermutePass pass, bool prob) {
  PermuteProblem p;
  p.pass = pass;
  p.tokens = shape.rows;
  p.top_k = static_cast<int>(shape.settings.top_k);
  p.rows = shape.rows * shape.settings.top_k;
  p.hidden = shape.settings.hidden;
  p.experts = static_cast<int>(shape.settings.experts);
  p.dtype = row_type(shape.recipe);
  p.prob = prob;
  return p;
}

GroupedMlpProblem mlp_problem(const NetworkShape& shape) {
  const bool train = shape.mode == Mode::kTrain;
  GroupedMlpProblem p;
  p.rows = shape.rows * shape.settings.top_k;
  p.hidden = shape.settings.hidden;
  p.features = shape.settings.features;
  p.experts = static_cast<int>(shape.settings.experts);
  p.recipe = shape.recipe;
  p.dtype = row_type(shape.recipe);
  p.parameters.weight = p.parameters.dw = DType::kF32;
  p.prob = true;
  p.dgrad = p.wgrad1 = p.wgrad2 = p.dprob = train;
  p.options.cache_weights = !train;
  return p;
}

BlockPlans plan_block(const NetworkShape& shape, const Device& device) {
  const Settings& s = shape.settings;
  const bool train = shape.mode == Mode::kTrain;
  const auto permute = [&](PermutePass pass, bool prob) {
    return plan(permute_problem(shape, pass, prob), device);
  };
  return {.router = plan_dense({shape.rows, s.experts, s.hidden, DType::kF32, train}, device),
          .routing = plan(routing_problem(shape, false), device),
          .routing_backward = plan(routing_problem(shape, true), device),
          .offsets = plan(offsets_problem(shape), device),
          .permute = permute(PermutePass::kPermute, true),
          .permute_backward = permute(PermutePass::kPermuteBackward, true),
          .combine = permute(PermutePass::kCombine, false),
          .combine_backward = permute(PermutePass::kCombineBackward, false),
          .experts = plan(mlp_problem(shape), device)};
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
  void add_steps(const LayerPlan& layer) {
    for (const LayerStep& step : layer.steps) {
      std::visit([&](const auto& plan) { add(plan); }, step.plan);
    }
  }
  void add(const GroupedMlpPlan& p) { add_steps(p.fc1), add_steps(p.fc2), add_steps(p); }

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
  return std::max(
      {router.workspace_bytes(), routing.workspace_bytes, routing_backward.workspace_bytes,
       offsets.workspace_bytes, permute.workspace_bytes, permute_backward.workspace_bytes,
       combine.workspace_bytes, combine_backward.workspace_bytes,
       experts.memory.forward_workspace_bytes, experts.memory.backward_workspace_bytes});
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
  const BlockPlans& b = plans.block;
  PlanNames names;
  names.add(b.router), names.add(plans.head), names.add(b.experts);
  names.add(b.routing), names.add(b.routing_backward), names.add(b.offsets);
  for (const PermutePlan& p : {b.permute, b.permute_backward, b.combine, b.combine_backward}) {
    names.add(p);
  }
  return names.joined();
}

}  // namespace cadre::train
