#pragma once
#include <memory>

#include "bench/buffers.h"
#include "bench/draw.h"
#include "cadre/grouped_linear.h"
#include "cadre/grouped_mlp.h"

namespace cadre::bench {

/// A planned layer with arguments of random data: what its forward and backward touch.
template <class Plan, class Args>
struct LayerCase {
  Plan plan;
  Args args;
  Workspace workspace;  ///< of either direction
  std::unique_ptr<Buffers> buffers;
};

using LinearCase = LayerCase<GroupedLinearPlan, GroupedLinearArgs>;
using MlpCase = LayerCase<GroupedMlpPlan, GroupedMlpArgs>;

LinearCase make_layer_case(const GroupedLinearProblem&, const Device&, const Draw&);
MlpCase make_layer_case(const GroupedMlpProblem&, const Device&, const Draw&);

}  // namespace cadre::bench
