#include <ATen/ops/empty.h>

#include <tuple>

#include "arguments.h"
#include "call_memory.h"

// torch.ops.cadre.bias_grad: docs/ops/bias_grad.md.
namespace cadre::door {
namespace {

using BiasGradients = std::tuple<Tensor, Tensor>;  ///< dbias, dbias_scale

struct BiasGradInputs {
  const Tensor& dy;
  const Tensor& offsets;
  const Maybe& bias_scale;
  const Maybe& bias;
};

void require_both(const BiasGradInputs& in) {
  TORCH_CHECK_VALUE(in.dy.dim() == 2, "dy has shape ", in.dy.sizes(), ", must be [R, N]");
  TORCH_CHECK_VALUE(in.bias_scale.has_value() == in.bias.has_value(), "bias is ",
                    in.bias ? "given" : "None", ", must be ", in.bias_scale ? "given" : "None",
                    "; the gradient of bias_scale is made from it, and nothing else is");
}

void run_bias_grad(const BiasGradInputs& in, const BiasGradients& out, Tail tail) {
  require_both(in);
  const auto& [dbias, dbias_scale] = out;
  const Tensor dy = with_rows(in.dy, "dy");
  const int64_t rows = dy.size(0);
  const Tensor scale = read_floats(in.bias_scale, {"bias_scale", {rows}, dy});
  const Tensor bias = in.bias ? with_rows(*in.bias, "bias") : Tensor();
  require_same_device(dy, bias, "bias");
  BiasGradArgs args{
      .dy = view(dy, "dy"), .offsets = offsets(in.offsets, dy), .dbias = view(dbias, "dbias")};
  args.bias_scale = floats(scale, "bias_scale");
  args.bias = view(bias, "bias");
  BiasGradProblem p{.rows = rows, .n = dy.size(1), .experts = args.offsets.experts};
  p.dy = float_type(dy.scalar_type(), "dy");
  p.dbias = float_type(dbias.scalar_type(), "dbias");
  p.bias_scale = scale.defined();
  if (bias.defined()) p.bias = float_type(bias.scalar_type(), "bias");
  p.tail = tail;
  if (p.bias_scale) args.dbias_scale = written_floats(dbias_scale, {"dbias_scale", {rows}, dy});
  launch(p, args, dy);
}

BiasGradients bias_grad_op(const Tensor& dy, const Tensor& offsets, const Maybe& bias_scale,
                           const Maybe& bias, std::optional<at::ScalarType> dtype) {
  const BiasGradInputs in{dy, offsets, bias_scale, bias};
  require_both(in);
  const auto type = dtype.value_or(bias ? bias->scalar_type() : dy.scalar_type());
  if (dtype) float_type(type, "dtype");
  const int64_t experts = door::offsets(offsets, dy).experts;
  const int64_t scales = bias_scale ? dy.size(0) : 0;
  const BiasGradients out{at::empty({experts, dy.size(1)}, dy.options().dtype(type)),
                          at::empty({scales}, dy.options().dtype(at::kFloat))};
  run_bias_grad(in, out, Tail::kZero);
  return out;
}

void implement(torch::Library& m) {
  m.impl("bias_grad", bias_grad_op);
  implement_out(
      m, "bias_grad",
      +[](const Tensor& dy, const Tensor& offsets, const Maybe& bias_scale, const Maybe& bias,
          const Tensor& dbias, const Tensor& dbias_scale) {
        run_bias_grad({dy, offsets, bias_scale, bias},
                      {written(dbias, "dbias", dy), written(dbias_scale, "dbias_scale", dy)},
                      Tail::kKeep);
      });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  m.def(
      "bias_grad(Tensor dy, Tensor offsets, Tensor? bias_scale=None, Tensor? bias=None, "
      "ScalarType? dtype=None) -> (Tensor dbias, Tensor dbias_scale)");
  m.def(
      "bias_grad.out(Tensor dy, Tensor offsets, Tensor? bias_scale=None, Tensor? bias=None, *, "
      "Tensor(a!) dbias, Tensor(b!) dbias_scale) -> ()");
}
TORCH_LIBRARY_IMPL(cadre, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, CUDA, m) { implement(m); }

}  // namespace cadre::door
