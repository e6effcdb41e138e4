#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <tuple>

#include "call_memory.h"
#include "quantized.h"

// torch.ops.cadre.quantize: docs/ops/quantize.md.
namespace cadre::door {
namespace {

using CodesAndScales = std::tuple<Tensor, Tensor, Tensor>;  ///< codes, scales, expert_scale

/// What quantize takes besides the source, its format and axis.
struct QuantizeOptions {
  const Maybe& rng;
  double amax_eps;
};

const uint64_t* seed_of(const Maybe& rng, const Tensor& on) {
  if (!rng) return nullptr;
  require(*rng, {"rng", {2}, on});
  const auto type = rng->scalar_type();
  if (type != at::kUInt64) require_type(*rng, at::kLong, "rng");
  TORCH_CHECK_VALUE(rng->is_contiguous(), "rng has strides ", rng->strides(),
                    ", must be contiguous");
  return static_cast<const uint64_t*>(rng->data_ptr());
}

void run_quantize(const Tensor& source, const QuantizedSpec& spec, const QuantizeOptions& options,
                  const QuantizedTensors& tensors) {
  const QuantizedShape shape = quantized_shape(spec);
  QuantizeProblem p{.kind = shape.kind, .rows = shape.rows, .cols = shape.cols};
  p.experts = shape.experts;
  p.source = float_type(source.scalar_type(), "source");
  const bool along_k = shape.axis == Axis::kAlongK;
  (along_k ? p.along_k : p.along_rows) = shape.format;
  p.role = shape.kind == RowsKind::kRagged ? TensorRole::kX : TensorRole::kW;
  p.amax_eps = float(options.amax_eps);
  const Tensor read = with_rows(source, "source");
  QuantizeArgs args{.source = view(read, "source")};
  if (spec.offsets) args.offsets = offsets(*spec.offsets, read);
  (along_k ? args.along_k : args.along_rows) = view(tensors, shape, read);
  args.rng = seed_of(options.rng, read);
  TORCH_CHECK_VALUE(!options.rng || shape.format.stochastic, "rng is given, must be None; ",
                    to_string(shape.format), " draws no numbers, write sr for that");
  launch(p, args, read);
}

void implement(torch::Library& m) {
  m.impl("quantize", [](const Tensor& source, const Maybe& offsets, c10::string_view format,
                        c10::string_view axis, const Maybe& rng, double amax_eps) {
    const auto lengths = source.sym_sizes();
    const QuantizedSpec spec{lengths, offsets, format, axis};
    const QuantizedTensors tensors = new_quantized_tensors(spec, source);
    run_quantize(source, spec, {rng, amax_eps}, tensors);
    return CodesAndScales{tensors.codes, tensors.scales, tensors.expert_scale};
  });
  implement_out(
      m, "quantize",
      +[](const Tensor& source, const Maybe& offsets, c10::string_view format,
          c10::string_view axis, const Maybe& rng, double amax_eps, const Tensor& codes,
          const Tensor& scales, const Tensor& expert_scale) {
        const QuantizedTensors tensors{written(codes, "codes", source),
                                       written(scales, "scales", source),
                                       written(expert_scale, "expert_scale", source)};
        run_quantize(source, {source.sym_sizes(), offsets, format, axis}, {rng, amax_eps}, tensors);
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
// A gradient would be lost in silence.
TORCH_LIBRARY_IMPL(cadre, Autograd, m) {
  m.impl("quantize", torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(cadre, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, CUDA, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, Meta, m) {
  m.impl("quantize", [](const Tensor& source, const Maybe& offsets, c10::string_view format,
                        c10::string_view axis, const Maybe& rng, double) {
    if (offsets) require_same_device(source, *offsets, "offsets");
    if (rng) require_same_device(source, *rng, "rng");
    const QuantizedTensors tensors =
        new_quantized_tensors({source.sym_sizes(), offsets, format, axis}, source);
    return CodesAndScales{tensors.codes, tensors.scales, tensors.expert_scale};
  });
}

}  // namespace cadre::door
