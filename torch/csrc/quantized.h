#pragma once
#include "arguments.h"

// Codes and scales as tensors: what quantize writes and dequantize reads.
namespace cadre::door {

/// What is quantised and how: rows [R, C] with offsets, or weights [E, N, K].
struct QuantizedSpec {
  c10::SymIntArrayRef shape;
  const std::optional<at::Tensor>& offsets;
  c10::string_view format;
  c10::string_view axis;
};
/// Errors    ValueError for another number of dimensions, a format or an axis.
QuantizedShape quantized_shape(const QuantizedSpec&);

/// The three tensors of `quantize`; those that the format does not have are empty.
struct QuantizedTensors {
  at::Tensor codes, scales, expert_scale;
};

/// New tensors on the device of `like`, all zero: nobody writes the tail. Lengths may be symbolic.
QuantizedTensors new_quantized_tensors(const QuantizedSpec&, const at::Tensor& like);

/// The tensors as the library sees them. Errors    ValueError for a type or a number of elements.
QuantizedView view(const QuantizedTensors&, const QuantizedShape&, const at::Tensor& on);

}  // namespace cadre::door
