#include <ATen/ops/empty.h>

#include "arguments.h"
#include "call_memory.h"
#include "parameters.h"

// torch.ops.cadre.scaled_grouped_mm: fprop of codes of fp8_row, docs/ops/grouped_gemm.md, with the
// operands as torch._scaled_grouped_mm has them.
namespace cadre::door {
namespace {

/// The arguments of the operator, except for the output.
struct ScaledInputs {
  const Tensor& mat_a;    ///< [M, K]
  const Tensor& mat_b;    ///< [E, K, N], each of its matrices column-major
  const Tensor& scale_a;  ///< [M]
  const Tensor& scale_b;  ///< [E, N]
  const Tensor& offsets;
  const Maybe& bias;
};

void require_operands(const ScaledInputs& in) {
  const auto type = in.mat_a.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat8_e4m3fn || type == at::kFloat8_e5m2, "mat_a is ",
                   dtype_name(type), ", must be torch.float8_e4m3fn or torch.float8_e5m2");
  require_type(in.mat_b, at::kFloat8_e4m3fn, "mat_b");
  TORCH_CHECK_VALUE(in.mat_a.dim() == 2, "mat_a has shape ", in.mat_a.sizes(), ", must be [M, K]");
  TORCH_CHECK_VALUE(in.mat_b.dim() == 3, "mat_b has shape ", in.mat_b.sizes(),
                    ", must be [E, K, N]");
  TORCH_CHECK_VALUE(in.mat_a.size(1) == in.mat_b.size(1), "mat_a has ", in.mat_a.size(1),
                    " columns, must have ", in.mat_b.size(1), ", as many as mat_b has rows");
  TORCH_CHECK_VALUE(order_of(in.mat_a) == Major::kRow, "mat_a has strides ", in.mat_a.strides(),
                    ", must be row-major");
  TORCH_CHECK_VALUE(order_of(in.mat_b.transpose(1, 2)) == Major::kRow, "mat_b has strides ",
                    in.mat_b.strides(),
                    ", must be column-major: w.transpose(-2, -1) of a contiguous w [E, N, K]");
}

Format lines_of(const Tensor& codes, const char* what) {
  Format lines = format(FormatKind::kFp8Row);
  lines.element = element_type(codes.scalar_type(), what);
  return lines;
}

/// Scales as the library has them: one a line of codes that is contracted.
TensorView scales_of(const Tensor& scales, const char* what) {
  return view(scales.unsqueeze(-1), what);
}

void run_scaled(const ScaledInputs& in, Tail tail, const Tensor& out) {
  require_operands(in);
  const Tensor w = in.mat_b.transpose(1, 2);
  GroupedGemmProblem p{.rows = in.mat_a.size(0), .n = w.size(1), .k = w.size(2), .tail = tail};
  require_same_device(in.mat_a, w, "mat_b");
  require_same_device(in.mat_a, out, "out");
  const Tensor a_scales = read_floats(in.scale_a, {"scale_a", {p.rows}, in.mat_a});
  const Tensor b_scales = read_floats(in.scale_b, {"scale_b", {w.size(0), p.n}, in.mat_a});
  const Tensor bias = in.bias ? with_rows(*in.bias, "bias") : Tensor();
  require_same_device(in.mat_a, bias, "bias");
  TORCH_CHECK_VALUE(order_of(out) == Major::kRow, "out has strides ", out.strides(),
                    ", must be row-major");
  GroupedGemmArgs args{
      .lhs = {.codes = view(in.mat_a, "mat_a"), .scales = scales_of(a_scales, "scale_a")},
      .rhs = {.codes = view(w, "mat_b"), .scales = scales_of(b_scales, "scale_b")},
      .offsets = offsets(in.offsets, in.mat_a),
      .out = view(out, "out")};
  p.experts = args.offsets.experts;
  p.lhs = lines_of(in.mat_a, "mat_a"), p.rhs = lines_of(w, "mat_b");
  p.out = float_type(out.scalar_type(), "out");
  p.align = alignment({in.mat_a, w, out});
  p.bias = bias.defined();
  if (p.bias) p.bias_dtype = float_type(bias.scalar_type(), "bias"), args.bias = view(bias, "bias");
  launch(p, args, in.mat_a);
}

Tensor new_scaled(const Tensor& mat_a, const Tensor& mat_b, const Tensor& scale_a,
                  const Tensor& scale_b, const Tensor& offsets, const Maybe& bias,
                  at::ScalarType out_dtype) {
  const ScaledInputs in{mat_a, mat_b, scale_a, scale_b, offsets, bias};
  require_operands(in);
  float_type(out_dtype, "out_dtype");
  const Tensor out = at::empty({mat_a.size(0), mat_b.size(2)}, mat_a.options().dtype(out_dtype));
  run_scaled(in, Tail::kZero, out);
  return out;
}

void implement(torch::Library& m) {
  m.impl("scaled_grouped_mm", new_scaled);
  implement_out(
      m, "scaled_grouped_mm",
      +[](const Tensor& mat_a, const Tensor& mat_b, const Tensor& scale_a, const Tensor& scale_b,
          const Tensor& offsets, const Maybe& bias, const Tensor& out) {
        run_scaled({mat_a, mat_b, scale_a, scale_b, offsets, bias}, Tail::kKeep,
                   written(out, "out", mat_a));
      });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  m.def(
      "scaled_grouped_mm(Tensor mat_a, Tensor mat_b, Tensor scale_a, Tensor scale_b, Tensor "
      "offsets, *, Tensor? bias=None, ScalarType out_dtype) -> Tensor");
  m.def(
      "scaled_grouped_mm.out(Tensor mat_a, Tensor mat_b, Tensor scale_a, Tensor scale_b, Tensor "
      "offsets, *, Tensor? bias=None, Tensor(a!) out) -> ()");
}
TORCH_LIBRARY_IMPL(cadre, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, CUDA, m) { implement(m); }

}  // namespace cadre::door
