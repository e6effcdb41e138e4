#pragma once
#include "cadre/offsets.h"
#include "cadre/routing.h"

// A routing with map=yes as what it is besides: offsets of the choices, with room for all of them.
namespace cadre::backend {

inline OffsetsProblem row_map_problem(const RoutingProblem& p) {
  return {.source = OffsetsSource::kRouting,
          .rows = p.tokens * p.top_k,
          .experts = p.experts,
          .tokens = p.tokens,
          .top_k = p.top_k};
}

inline OffsetsPlan row_map_plan(const RoutingPlan& plan) {
  OffsetsPlan map;
  map.problem = row_map_problem(plan.problem);
  map.device = plan.device;
  return map;
}

inline OffsetsArgs row_map_args(const RoutingArgs& args) {
  return {.source = args.experts,
          .offsets = args.offsets,
          .map = args.map,
          .prob = args.row_prob != nullptr ? args.prob : nullptr,
          .row_prob = args.row_prob};
}

}  // namespace cadre::backend
