#pragma once
#include "cadre/offsets.h"

namespace cadre::cpu {

/// Offsets by the formulas; the row map by a counting sort over pieces of the routing, in parallel.
void offsets(const OffsetsPlan&, const OffsetsArgs&, Workspace, Stream);
int64_t offsets_workspace_bytes(const OffsetsProblem&, const Device&);

}  // namespace cadre::cpu
