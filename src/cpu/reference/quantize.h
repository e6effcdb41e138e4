#pragma once
#include "cadre/quantize.h"

namespace cadre::cpu::reference {

/// Block by block, as docs/numerics.md says it.
void quantize(const QuantizePlan&, const QuantizeArgs&, Workspace, Stream);

}  // namespace cadre::cpu::reference
