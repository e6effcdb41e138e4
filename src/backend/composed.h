#pragma once
#include <cstdint>
#include <string>

#include "cadre/error.h"
#include "cadre/workspace.h"

// What implementations that are two operations, one after the other, have in common: what the first
// writes for the second lies at the start of the workspace.
namespace cadre::backend {

constexpr int64_t kAlignment = 256;

constexpr int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

inline Workspace behind(Workspace workspace, int64_t bytes) {
  return {static_cast<char*>(workspace.data) + bytes, workspace.bytes - bytes};
}

/// For `refuses`: why one of the two has no plan; empty if both have.
template <class PlanBoth>
std::string refusal_of(PlanBoth&& plan_both) {
  try {
    plan_both();
  } catch (const Unsupported& error) {
    return error.what();
  }
  return {};
}

}  // namespace cadre::backend
