#include <ATen/ops/zeros.h>

#include "quantized.h"

// torch.ops.cadre.dequantize: docs/ops/dequantize.md.
namespace cadre::door {
namespace {

void go(const Parts& parts, const Subject& subject, const Tensor& out) {
  const QuantizedShape shape = quantized_shape(subject);
  const Tensor& codes = parts.codes;
  require_same_device(codes, out, "out");
  DequantizeArgs args;
  args.source = view(parts, shape, codes);
  args.out = view(out);
  if (subject.offsets) args.offsets = offsets(*subject.offsets, codes);
  launch(DequantizeProblem{shape, args.out.dtype}, args, codes);
}

/// Zeros of the shape of the codes, transformed blocks whole, since nobody writes the tail.
Tensor make(const Subject& subject, const Tensor& like, at::ScalarType type) {
  std::vector<c10::SymInt> lengths = subject.shape.vec();
  const Format format = translated([&] { return parse_format(subject.format); });
  if (subject.offsets &&
      is_transformed(format, subject.axis == "along_rows" ? Axis::kAlongRows : Axis::kAlongK))
    lengths[0] = (lengths[0] / 16 + (subject.offsets->sym_size(0) - 1)) * 16;
  return at::zeros_symint(lengths, like.options().dtype(type));
}

void implement(torch::Library& m) {
  m.impl("dequantize", [](const Tensor& codes, const Tensor& scales, const Tensor& expert_scale,
                          const Maybe& offsets, c10::string_view format, c10::string_view axis,
                          c10::SymIntArrayRef shape, at::ScalarType dtype) {
    const Subject subject{shape, offsets, format, axis};
    quantized_shape(subject);
    Tensor out = make(subject, codes, dtype);
    go({codes, scales, expert_scale}, subject, out);
    return out;
  });
  m.impl("dequantize.out", [](const Tensor& codes, const Tensor& scales, const Tensor& expert_scale,
                              const Maybe& offsets, c10::string_view format, c10::string_view axis,
                              c10::SymIntArrayRef shape, const Tensor& out) {
    go({codes, scales, expert_scale}, {shape, offsets, format, axis}, written(out, "out", codes));
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
TORCH_LIBRARY_IMPL(cadre, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, CUDA, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, Meta, m) {
  m.impl("dequantize", [](const Tensor& codes, const Tensor&, const Tensor&, const Maybe& offsets,
                          c10::string_view format, c10::string_view axis, c10::SymIntArrayRef shape,
                          at::ScalarType dtype) {
    return make({shape, offsets, format, axis}, codes, dtype);
  });
}

}  // namespace cadre::door
