#include <tuple>

#include "quantized.h"

// torch.ops.cadre.quantize: docs/ops/quantize.md.
namespace cadre::door {
namespace {

using Three = std::tuple<Tensor, Tensor, Tensor>;  ///< codes, scales, expert_scale

/// How, beside format and axis.
struct Extra {
  const Maybe& rng;
  double amax_eps;
};

const uint64_t* seed_of(const Maybe& rng, const Tensor& on) {
  if (!rng) return nullptr;
  require(*rng, {"rng", {2}, on});
  const auto type = rng->scalar_type();
  TORCH_CHECK_VALUE((type == at::kLong || type == at::kUInt64) && rng->is_contiguous(), "rng is ",
                    type, ", must be int64 or uint64 and contiguous");
  return static_cast<const uint64_t*>(rng->data_ptr());
}

void go(const Tensor& source, const Subject& subject, const Extra& extra, const Parts& parts) {
  const QuantizedShape shape = quantized_shape(subject);
  QuantizeProblem p{.kind = shape.kind, .rows = shape.rows, .cols = shape.cols};
  p.experts = shape.experts;
  p.source = element_type(source.scalar_type());
  const bool along_k = shape.axis == Axis::kAlongK;
  (along_k ? p.along_k : p.along_rows) = shape.format;
  p.role = shape.kind == RowsKind::kRagged ? TensorRole::kX : TensorRole::kW;
  p.amax_eps = float(extra.amax_eps);
  const Tensor read = with_rows(source);
  QuantizeArgs args{.source = view(read)};
  if (subject.offsets) args.offsets = offsets(*subject.offsets, read);
  (along_k ? args.along_k : args.along_rows) = view(parts, shape, read);
  args.rng = seed_of(extra.rng, read);
  launch(p, args, read);
}

void implement(torch::Library& m) {
  m.impl("quantize", [](const Tensor& source, const Maybe& offsets, c10::string_view format,
                        c10::string_view axis, const Maybe& rng, double amax_eps) {
    const auto lengths = source.sym_sizes();
    const Subject subject{lengths, offsets, format, axis};
    const Parts parts = new_parts(subject, source);
    go(source, subject, {rng, amax_eps}, parts);
    return Three{parts.codes, parts.scales, parts.expert_scale};
  });
  m.impl("quantize.out", [](const Tensor& source, const Maybe& offsets, c10::string_view format,
                            c10::string_view axis, const Maybe& rng, double amax_eps,
                            const Tensor& codes, const Tensor& scales, const Tensor& expert_scale) {
    const Parts parts{written(codes, "codes", source), written(scales, "scales", source),
                      written(expert_scale, "expert_scale", source)};
    go(source, {source.sym_sizes(), offsets, format, axis}, {rng, amax_eps}, parts);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  m.def(
      "quantize(Tensor source, Tensor? offsets, str format, str axis, Tensor? rng=None, float "
      "amax_eps=0.0) -> (Tensor codes, Tensor scales, Tensor expert_scale)");
  m.def(
      "quantize.out(Tensor source, Tensor? offsets, str format, str axis, Tensor? rng=None, float "
      "amax_eps=0.0, *, Tensor(a!) codes, Tensor(b!) scales, Tensor(c!) expert_scale) -> ()");
}
TORCH_LIBRARY_IMPL(cadre, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, CUDA, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, Meta, m) {
  m.impl("quantize", [](const Tensor& source, const Maybe& offsets, c10::string_view format,
                        c10::string_view axis, const Maybe&, double) {
    const Parts parts = new_parts({source.sym_sizes(), offsets, format, axis}, source);
    return Three{parts.codes, parts.scales, parts.expert_scale};
  });
}

}  // namespace cadre::door
