#pragma once
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/device.h"
#include "cadre/error.h"
#include "cadre/plan.h"

// The ways in which a layer can run, as operations have implementations.
namespace cadre::layers {

/// One way to run a layer. A layer lists its routes best first and takes the first one that does
/// not refuse, and is not slow.
template <class Problem, class LayerPlan>
struct Route {
  std::string_view name;
  std::string (*refuses)(const Problem&, const Device&);  ///< empty: takes it; else the reason
  LayerPlan (*plan)(const Problem&, const Device&);       ///< its steps and memory
  /// Of others it is passed over unless it is named.
  bool (*is_for)(const Problem&, const Device&) = nullptr;
  /// Why a later route is faster, where one is: unless it is named it refuses with that.
  std::string (*why_slow)(const Problem&, const Device&) = nullptr;
};

/// For `refuses` of a route that takes every problem.
template <class Problem>
std::string takes_all(const Problem&, const Device&) {
  return {};
}

/// Takes the first route that does not refuse, or the one called `only`. A route one of whose steps
/// has no implementation refuses with what that operation says.
/// Errors    Unsupported listing every route and its reason; InvalidArgument if no route is called
///           `only`.
template <class LayerPlan, class Problem>
LayerPlan choose(std::span<const Route<Problem, LayerPlan>> routes, const Problem& problem,
                 const Device& device, std::string_view only) {
  std::vector<Refusal> refused;
  std::string names, reasons;
  for (const Route<Problem, LayerPlan>& route : routes) {
    names.append(names.empty() ? "" : ", ").append(route.name);
    if (only.empty() ? route.is_for && !route.is_for(problem, device) : route.name != only)
      continue;
    std::string why;
    try {
      why = route.refuses(problem, device);
      if (why.empty() && only.empty() && route.why_slow) why = route.why_slow(problem, device);
      if (why.empty()) {
        LayerPlan plan = route.plan(problem, device);
        plan.name = route.name;
        plan.refusals = std::move(refused);
        return plan;
      }
    } catch (const Unsupported& step) {
      why = step.what();
    }
    reasons.append("\n  ").append(route.name).append(": ").append(why);
    refused.push_back({route.name, std::move(why)});
  }
  require(only.empty() || !refused.empty(), "plan: route is '", only, "', must be one of ", names,
          " [", to_string(problem), "]");
  throw Unsupported(text("no implementation on ", to_string(device), " for '", to_string(problem),
                         "':", reasons));
}

}  // namespace cadre::layers
