#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include "call_memory.h"
#include "quantized.h"

// torch.ops.cadre.dequantize: docs/ops/dequantize.md.
namespace cadre::door {
namespace {

void run_dequantize(const QuantizedTensors& tensors, const QuantizedSpec& spec, const Tensor& out) {
  const QuantizedShape shape = quantized_shape(spec);
  const Tensor& codes = tensors.codes;
  require_same_device(codes, out, "out");
  DequantizeArgs args;
  float_type(out.scalar_type(), "dtype");
  args.source = view(tensors, shape, codes);
  args.out = view(out, "out");
  if (spec.offsets) args.offsets = offsets(*spec.offsets, codes);
  launch(DequantizeProblem{shape, args.out.dtype}, args, codes);
}

/// Zeros of the shape of the codes, transformed blocks whole, since nobody writes the tail.
Tensor new_output(const QuantizedSpec& spec, const Tensor& like, at::ScalarType type) {
  std::vector<c10::SymInt> lengths = spec.shape.vec();
  const Format format = translate_errors([&] { return parse_format(spec.format); });
  if (spec.offsets &&
      is_transformed(format, spec.axis == "along_rows" ? Axis::kAlongRows : Axis::kAlongK))
    lengths[0] = (lengths[0] / 16 + (spec.offsets->sym_size(0) - 1)) * 16;
  return at::zeros_symint(lengths, like.options().dtype(type));
}

void implement(torch::Library& m) {
  m.impl("dequantize", [](const Tensor& codes, const Tensor& scales, const Tensor& expert_scale,
                          const Maybe& offsets, c10::string_view format, c10::string_view axis,
                          c10::SymIntArrayRef shape, at::ScalarType dtype) {
    const QuantizedSpec spec{shape, offsets, format, axis};
    const QuantizedShape found = quantized_shape(spec);
    TORCH_CHECK_VALUE(found.rows >= 0 && found.cols >= 0 && found.experts >= 0, "shape is ", shape,
                      ", must be 0 or more each");
    Tensor out = new_output(spec, codes, dtype);
    run_dequantize({codes, scales, expert_scale}, spec, out);
    return out;
  });
  implement_out(
      m, "dequantize",
      +[](const Tensor& codes, const Tensor& scales, const Tensor& expert_scale,
          const Maybe& offsets, c10::string_view format, c10::string_view axis,
          c10::SymIntArrayRef shape, const Tensor& out) {
        run_dequantize({codes, scales, expert_scale}, {shape, offsets, format, axis},
                       written(out, "out", codes));
      });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  m.def(
      "dequantize(Tensor codes, Tensor scales, Tensor expert_scale, Tensor? offsets, str format, "
      "str axis, SymInt[] shape, ScalarType dtype) -> Tensor");
  m.def(
      "dequantize.out(Tensor codes, Tensor scales, Tensor expert_scale, Tensor? offsets, str "
      "format, str axis, SymInt[] shape, *, Tensor(a!) out) -> ()");
}
// A gradient would be lost in silence.
TORCH_LIBRARY_IMPL(cadre, Autograd, m) {
  m.impl("dequantize", torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(cadre, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, CUDA, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, Meta, m) {
  m.impl("dequantize", [](const Tensor& codes, const Tensor& scales, const Tensor& expert_scale,
                          const Maybe& offsets, c10::string_view format, c10::string_view axis,
                          c10::SymIntArrayRef shape, at::ScalarType dtype) {
    require_same_device(codes, scales, "scales");
    require_same_device(codes, expert_scale, "expert_scale");
    if (offsets) require_same_device(codes, *offsets, "offsets");
    return new_output({shape, offsets, format, axis}, codes, dtype);
  });
}

}  // namespace cadre::door
