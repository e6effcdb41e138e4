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

/// The first implementation that does not refuse, or the one called `only` if it does not. If there
/// is none, a plan without a name, whose refusals say why.
template <class Problem>
Plan<Problem> find(const Problem& problem, const Device& device, std::string_view only) {
  Plan<Problem> plan{.problem = problem, .device = device, .name = {}, .refusals = {}};
  for (const Entry<Problem>& entry : entries_on<Problem>(device)) {
    if (!only.empty() && entry.name != only) continue;
    std::string why = entry.refuses(problem, device);
    if (why.empty() && entry.by_name && only.empty())
      why = "takes it where it is named; it is not known to be the fastest";
    if (!why.empty()) {
      plan.refusals.push_back({entry.name, std::move(why)});
      continue;
    }
    plan.name = entry.name;
    plan.workspace_bytes = entry.workspace_bytes(problem, device);
    plan.exact = entry.exact;
    plan.fraction_bits = entry.fraction_bits;
    plan.entry = &entry;
    if (entry.inner != nullptr) {
      Inner inner = entry.inner(problem, device);
      plan.inner = std::move(inner.plans);
      plan.fraction_bits = inner.fraction_bits;
    }
    break;
  }
  return plan;
}

/// The implementations of an operation: "cpu_onednn, cpu, cpu_reference".
template <class Problem>
std::string names_on(const Device& device) {
  std::string names;
  for (const Entry<Problem>& entry : entries_on<Problem>(device)) {
    if (!names.empty()) names += ", ";
    names += entry.name;
  }
  return names;
}

/// As find().
/// Errors    Unsupported listing every implementation and its reason; InvalidArgument if no
///           implementation is called `only`.
template <class Problem>
Plan<Problem> choose(const Problem& problem, const Device& device, std::string_view only) {
  Plan<Problem> plan = backend::find(problem, device, only);
  if (!plan.name.empty()) return plan;
  if (!only.empty() && plan.refusals.empty())
    throw InvalidArgument(text("plan: implementation is '", only, "', must be one of ",
                               names_on<Problem>(device), " [", problem, "]"));
  std::string refusals;
  for (const Refusal& refusal : plan.refusals)
    refusals.append("\n  ").append(refusal.name).append(": ").append(refusal.why);
  if (refusals.empty()) refusals = " none is written for this device yet";
  throw Unsupported(text("no implementation on ", device, " for '", problem, "':", refusals));
}

/// Errors    InvalidArgument for a plan that nobody made, or that was moved from.
template <class Problem>
void require_made(const Plan<Problem>& plan) {
  const auto* entry = static_cast<const Entry<Problem>*>(plan.entry);
  require(entry != nullptr && (entry->inner == nullptr || plan.inner != nullptr),
          "run: the plan is empty; make it with plan()");
}

/// What the implementation of a plan asks of the arguments besides what the operation does.
template <class Problem>
void check(const Plan<Problem>& plan, const typename Problem::Args& args) {
  const auto* entry = static_cast<const Entry<Problem>*>(plan.entry);
  if (entry != nullptr && entry->check != nullptr) entry->check(plan.problem, args);
  if (entry == nullptr || entry->check_inner == nullptr) return;
  require_made(plan);
  entry->check_inner(plan, args);
}

/// Launches a plan that `choose` made, after the checks that every operation shares.
template <class Problem>
void launch(const Plan<Problem>& plan, const typename Problem::Args& args, Workspace workspace,
            Stream stream) {
  require_made(plan);
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
