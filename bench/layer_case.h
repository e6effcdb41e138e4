#pragma once
#include <algorithm>
#include <memory>
#include <string_view>
#include <vector>

#include "bench/case.h"
#include "bench/mirror.h"
#include "cadre/moe.h"
#include "cadre/sequential.h"

namespace cadre::bench {

/// A tensor that a layer writes, all of its bytes. `live` counts the rows that belong to experts or
/// tokens.
struct LayerOutput : Output {
  bool anew = true;  ///< a step writes it whatever it held: it is wanted, and nothing is added to
};

/// A planned layer with arguments of random data: what its forward and backward touch.
template <class Plan, class Args>
struct LayerCase {
  Plan plan;
  Args args;
  Workspace workspace;               ///< of either direction
  std::vector<LayerOutput> outputs;  ///< of both directions, in full: tails stay as they are
  std::unique_ptr<Buffers> buffers;
};

using LinearCase = LayerCase<GroupedLinearPlan, GroupedLinearArgs>;
using MlpCase = LayerCase<GroupedMlpPlan, GroupedMlpArgs>;
using MoeCase = LayerCase<MoePlan, MoeArgs>;

/// What the arguments of a row list.
struct SequentialLists {
  std::vector<LinearParameters> parameters;
  std::vector<const float*> extra_inputs;
  std::vector<float*> extra_gradients;
};
struct SequentialCase : LayerCase<SequentialPlan, SequentialArgs> {
  SequentialLists lists;
};

LinearCase make_layer_case(const GroupedLinearProblem&, const Device&, const Draw&);
MlpCase make_layer_case(const GroupedMlpProblem&, const Device&, const Draw&);
/// Its tokens fall to experts as the draw says.
MoeCase make_layer_case(const MoeProblem&, const Device&, const Draw&);
SequentialCase make_layer_case(const SequentialProblem&, const Device&, const Draw&);

/// Whether a layer leaves a weight gradient to wgrad.
bool defers(const GroupedLinearProblem&);
bool defers(const GroupedMlpProblem&);
bool defers(const MoeProblem&);
bool defers(const SequentialProblem&);

/// Whether weights are quantised once for several calls.
bool caches_weights(const GroupedLinearProblem&);
bool caches_weights(const GroupedMlpProblem&);
bool caches_weights(const MoeProblem&);
bool caches_weights(const SequentialProblem&);

/// The arguments of a case for a copy of its buffers.
template <class Plan, class Args>
Args moved(const Mirror& mirror, const LayerCase<Plan, Args>& c) {
  return mirror.moved(c.args);
}
/// They point into the lists of the case, which are of the copy then.
SequentialArgs moved(const Mirror&, SequentialCase&);

/// Parses a problem of any layer and calls `visit(problem)`.
/// Errors    InvalidArgument from parsing.
template <class Visit>
auto visit_layer(std::string_view words, Visit&& visit) {
  const size_t start = std::min(words.find_first_not_of(" \t"), words.size());
  const std::string_view name = words.substr(start, words.find_first_of(" \t", start) - start);
  if (name == "grouped_linear") return visit(parse_grouped_linear_problem(words));
  if (name == "grouped_mlp") return visit(parse_grouped_mlp_problem(words));
  if (name == "moe") return visit(parse_moe_problem(words));
  return visit(parse_sequential_problem(words));
}

}  // namespace cadre::bench
