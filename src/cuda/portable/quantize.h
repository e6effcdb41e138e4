#pragma once
#include <string>

#include "cadre/dequantize.h"
#include "cadre/quantize.h"

namespace cadre::cuda::portable {

/// Every format, along K, along rows, or both: from one read of the source if both have the same
/// kind of codes. A copy of plain values beside a quantised one is a cast. Scales of whole experts
/// or lines take one more read.
void quantize(const QuantizePlan&, const QuantizeArgs&, Workspace, Stream);
std::string refuses_quantize(const QuantizeProblem&, const Device&);
int64_t quantize_workspace_bytes(const QuantizeProblem&, const Device&);

/// Codes and scales back to values.
void dequantize(const DequantizePlan&, const DequantizeArgs&, Workspace, Stream);
std::string refuses_dequantize(const DequantizeProblem&, const Device&);

}  // namespace cadre::cuda::portable
