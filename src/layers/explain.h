#pragma once
#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/error.h"
#include "cadre/layer.h"
#include "cadre/plan.h"

// The pieces of a layer's explanation.
namespace cadre::layers {

/// Errors    InvalidArgument if the plan is not one that plan() made.
inline void require_made(const LayerPlan& plan) {
  require(!plan.tensors.empty(), "layer: the plan is empty; make it with plan()");
}

/// "<problem>", "route <name>", and a line for every route that refused.
template <class Problem>
std::string explain_head(const Problem& problem, const LayerPlan& plan) {
  require_made(plan);
  std::string lines =
      text(to_string(problem), "\nroute ", plan.name, plan.exact ? "" : ", not exact", "\n");
  for (const Refusal& refusal : plan.refusals)
    lines += text("  not ", refusal.name, ": ", refusal.why, "\n");
  return lines;
}

/// "  <step>: <implementation>  [<problem>]", a line for every implementation that refused, and
/// which tensors it reads and writes.
std::string explain_step(const LayerPlan&, const LayerStep&);

/// The steps of forward and of backward.
std::string explain_steps(const LayerPlan&);

/// What a layer works on: so many rows, or tokens.
struct Items {
  std::string_view name;
  int64_t count;
};

inline bool has_part(const std::vector<KeptPart>& parts, std::string_view name) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](const KeptPart& part) { return part.name == name; });
}

/// The memory that the caller provides, and what is kept for one item.
std::string explain_memory(const LayerMemory&, const std::vector<KeptPart>&, const Items&);
inline std::string explain_memory(const LayerMemory& memory, const std::vector<KeptPart>& kept,
                                  int64_t rows) {
  return explain_memory(memory, kept, {"row", rows});
}

}  // namespace cadre::layers
