#pragma once
#include "arguments.h"

// Codes and scales as tensors: what quantize writes and dequantize reads.
namespace cadre::door {

/// The shape and format of what was, or will be, quantised: rows [R, C] with offsets, or weights
/// [E, N, K]. Errors    ValueError for another number of dimensions, a format or an axis.
struct Subject {
  c10::SymIntArrayRef shape;
  const std::optional<at::Tensor>& offsets;
  c10::string_view format;
  c10::string_view axis;
};
QuantizedShape quantized_shape(const Subject&);

/// The three tensors of `quantize`; those that the format does not have are empty.
struct Parts {
  at::Tensor codes, scales, expert_scale;
};

/// New tensors on the device of `like`, all zero: nobody writes the tail. Lengths may be symbolic.
Parts new_parts(const Subject&, const at::Tensor& like);

/// The parts as the core sees them. Errors    ValueError for a type or a number of elements.
QuantizedView view(const Parts&, const QuantizedShape&, const at::Tensor& on);

}  // namespace cadre::door
