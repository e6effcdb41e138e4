#pragma once
#include <string>

#include "cadre/offsets.h"

namespace cadre::cuda::portable {

/// Offsets, and of choices their row map, in one launch; of more than a few choices by blocks that
/// wait for each other.
void offsets(const OffsetsPlan&, const OffsetsArgs&, Workspace, Stream);
std::string refuses_offsets(const OffsetsProblem&, const Device&);
int64_t offsets_workspace_bytes(const OffsetsProblem&, const Device&);

}  // namespace cadre::cuda::portable
