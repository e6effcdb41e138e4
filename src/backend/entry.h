#pragma once
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "cadre/device.h"
#include "cadre/plan.h"
#include "cadre/stream.h"
#include "cadre/workspace.h"

namespace cadre::backend {

/// The plans that an implementation is composed of, and the bits that their sums keep: see Plan.
struct Inner {
  std::shared_ptr<const void> plans;
  int fraction_bits;
};

/// One implementation of one operation. Backends list theirs best first; the walk takes the first
/// that does not refuse.
template <class Problem>
struct Entry {
  using Args = typename Problem::Args;

  std::string_view name;
  std::string (*refuses)(const Problem&, const Device&);  ///< empty: takes it; else the reason
  int64_t (*workspace_bytes)(const Problem&, const Device&);
  void (*run)(const Plan<Problem>&, const Args&, Workspace, Stream);
  bool exact = true;
  void (*check)(const Problem&, const Args&) = nullptr;  ///< what it asks of arguments, if more
  bool by_name = false;    ///< not known to be the fastest: only who names it gets it
  int fraction_bits = 23;  ///< see Plan
  /// The plans that `run` finds in its own as `inner`, so that it makes none.
  Inner (*inner)(const Problem&, const Device&) = nullptr;
  void (*check_inner)(const Plan<Problem>&, const Args&) = nullptr;  ///< what these ask of them
};

template <class Problem>
using Entries = std::span<const Entry<Problem>>;

/// For `refuses` of an implementation that takes every problem of its device.
template <class Problem>
std::string takes_all(const Problem&, const Device&) {
  return {};
}

/// For `workspace_bytes` of an implementation that needs none.
template <class Problem>
int64_t no_workspace(const Problem&, const Device&) {
  return 0;
}

}  // namespace cadre::backend
