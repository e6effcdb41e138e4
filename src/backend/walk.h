#pragma once
#include <cstdint>
#include <type_traits>

#include "backend/lists.h"
#include "backend/poison.h"
#include "cadre/error.h"

namespace cadre::backend {

template <class Problem, class... Each>
constexpr bool is_listed(TypeList<Each...>) {
  return (std::is_same_v<Problem, typename Each::Problem> || ...);
}

/// The implementation list of the backend that a device belongs to.
template <class Problem>
Entries<Problem> entries_on(const Device& device) {
  static_assert(is_listed<Problem>(Operations{}), "an operation is a row of cadre/operations.h");
  const Lists& lists = device.kind == DeviceKind::kCpu ? cpu::lists() : cuda::lists();
  return std::get<Entries<Problem>>(lists);
}

/// Takes the first implementation that does not refuse, or the one called `only`.
/// Errors    Unsupported listing every implementation and its reason; InvalidArgument if no
///           implementation is called `only`.
template <class Problem>
Plan<Problem> choose(const Problem& problem, const Device& device, std::string_view only) {
  Plan<Problem> plan{.problem = problem, .device = device, .name = {}, .refusals = {}};
  std::string names, refusals;
  for (const Entry<Problem>& entry : entries_on<Problem>(device)) {
    names += text(names.empty() ? "" : ", ", entry.name);
    if (!only.empty() && entry.name != only) continue;
    std::string why = entry.refuses(problem, device);
    if (why.empty()) {
      plan.name = entry.name;
      plan.workspace_bytes = entry.workspace_bytes(problem, device);
      plan.exact = entry.exact;
      plan.entry = &entry;
      return plan;
    }
    refusals += text("\n  ", entry.name, ": ", why);
    plan.refusals.push_back({entry.name, std::move(why)});
  }
  require(only.empty() || !plan.refusals.empty(), "plan: implementation is '", only,
          "', must be one of ", names, " [", to_string(problem), "]");
  if (refusals.empty()) refusals = " none is written for this device yet";
  throw Unsupported(text("no implementation on ", to_string(device), " for '", to_string(problem),
                         "':", refusals));
}

/// What the implementation of a plan asks of the arguments besides what the operation does.
template <class Problem>
void check(const Plan<Problem>& plan, const typename Problem::Args& args) {
  const auto* entry = static_cast<const Entry<Problem>*>(plan.entry);
  if (entry != nullptr && entry->check != nullptr) entry->check(plan.problem, args);
}

/// Launches a plan that `choose` made, after the checks that every operation shares.
template <class Problem>
void launch(const Plan<Problem>& plan, const typename Problem::Args& args, Workspace workspace,
            Stream stream) {
  require(plan.entry != nullptr, "run: the plan is empty; make it with plan()");
  require(workspace.bytes >= plan.workspace_bytes, "run: workspace is ", workspace.bytes,
          " bytes, must be ", plan.workspace_bytes, " or more [", plan.problem, "]");
  require(plan.workspace_bytes == 0 ||
              (workspace.data != nullptr && reinterpret_cast<uintptr_t>(workspace.data) % 256 == 0),
          "run: workspace is at ", workspace.data, ", must be 256-byte aligned and not null [",
          plan.problem, "]");
  poison(plan.device, {workspace.data, plan.workspace_bytes}, stream);
  static_cast<const Entry<Problem>*>(plan.entry)->run(plan, args, workspace, stream);
}

}  // namespace cadre::backend
