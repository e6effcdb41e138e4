#pragma once
#include <string>

#include "cadre/dequantize.h"
#include "cadre/quantize.h"

namespace cadre::cuda::portable {

/// Casts between f32, bf16 and f16: quantising to a plain format and back. One launch, which reads
/// the source once for both copies, with the bits of the CPU's `cpu`.
void cast(const QuantizePlan&, const QuantizeArgs&, Workspace, Stream);
void cast(const DequantizePlan&, const DequantizeArgs&, Workspace, Stream);
/// The copy along an axis alone.
void cast_copy(const QuantizeProblem&, const QuantizeArgs&, Axis, Stream);

std::string refuses_cast(const QuantizeProblem&, const Device&);
std::string refuses_cast(const DequantizeProblem&, const Device&);

}  // namespace cadre::cuda::portable
