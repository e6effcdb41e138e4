#pragma once
#include <string>

#include "cadre/offsets.h"

namespace cadre::cuda::portable {

/// Offsets in one launch; of more than a few choices, with their row map, in two.
void offsets(const OffsetsPlan&, const OffsetsArgs&, Workspace, Stream);
std::string refuses_offsets(const OffsetsProblem&, const Device&);
int64_t offsets_workspace_bytes(const OffsetsProblem&, const Device&);

}  // namespace cadre::cuda::portable
