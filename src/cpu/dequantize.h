#pragma once
#include "cadre/dequantize.h"

namespace cadre::cpu {

/// Row by row, all threads sharing tiles of rows.
void dequantize(const DequantizePlan&, const DequantizeArgs&, Workspace, Stream);

}  // namespace cadre::cpu
