#pragma once
#include <string>

#include "cadre/quantize.h"

namespace cadre::cpu {

/// Tile by tile, each read once for both copies; where an expert or a line has one scale it is read
/// once before, for the amaxes. All threads share the tiles; the bits do not depend on how.
void quantize(const QuantizePlan&, const QuantizeArgs&, Workspace, Stream);

/// Of decoded copies.
std::string refuses_quantize(const QuantizeProblem&, const Device&);

/// An amax for each expert, or line, of a copy with one scale for it.
int64_t quantize_workspace_bytes(const QuantizeProblem&, const Device&);

}  // namespace cadre::cpu
