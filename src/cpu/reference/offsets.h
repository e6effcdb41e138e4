#pragma once
#include "cadre/offsets.h"

namespace cadre::cpu::reference {

/// Offsets by the formulas; the row map by looking through all choices once for every expert.
void offsets(const OffsetsPlan&, const OffsetsArgs&, Workspace, Stream);

}  // namespace cadre::cpu::reference
