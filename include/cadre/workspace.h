#pragma once
#include <cstdint>

#pragma GCC visibility push(default)
namespace cadre {

/// Scratch memory of one run, owned by the caller, on the device of the plan, 256-byte aligned and
/// at least `plan.workspace_bytes` long. Its content means nothing before and after a run. Two runs
/// that may overlap in time need two workspaces.
struct Workspace {
  void* data = nullptr;
  int64_t bytes = 0;
};

}  // namespace cadre
#pragma GCC visibility pop
