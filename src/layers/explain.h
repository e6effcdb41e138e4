#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/layer.h"
#include "cadre/plan.h"

// The pieces of a layer's explanation.
namespace cadre::layers {

/// "  <step>  <implementation>  <problem>", and a line for every implementation that refused.
template <class Problem>
std::string explain_step(std::string_view step, const Plan<Problem>& plan) {
  std::string lines = text("  ", step, ": ", plan.name, plan.exact ? "" : " (not exact)", "  [",
                           to_string(plan.problem), "]\n");
  for (const Refusal& refusal : plan.refusals)
    lines += text("    not ", refusal.name, ": ", refusal.why, "\n");
  return lines;
}
template <class Problem>
std::string explain_step(std::string_view step, const std::optional<Plan<Problem>>& plan) {
  return plan ? explain_step(step, *plan) : std::string();
}

/// The memory that the caller provides, and what is kept for one row.
std::string explain_memory(const LayerMemory&, const std::vector<KeptPart>&, int64_t rows);

}  // namespace cadre::layers
