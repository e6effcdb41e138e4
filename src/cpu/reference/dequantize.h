#pragma once
#include "cadre/dequantize.h"

namespace cadre::cpu::reference {

/// Element by element: out = (code * block scale) * expert scale.
void dequantize(const DequantizePlan&, const DequantizeArgs&, Workspace, Stream);

}  // namespace cadre::cpu::reference
