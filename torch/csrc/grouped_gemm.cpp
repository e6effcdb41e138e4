#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "arguments.h"
#include "call_memory.h"
#include "parameters.h"

// torch.ops.cadre.grouped_gemm: docs/ops/grouped_gemm.md. Its gradients are in
// grouped_gemm_autograd.cpp.
namespace cadre::door {
namespace {

/// One [E, N, K] tensor or E tensors [N, K], each a matrix of one order, and how they lie.
struct Matrices {
  std::vector<Tensor> tensors;  ///< one packed tensor, or one an expert; copies where need be
  TensorView view{};            ///< of all experts; null data where they are discrete
  Major major = Major::kRow;
  bool discrete = false;
};

Matrices matrix(const Tensor& t, const char* what) {
  float_type(t.scalar_type(), what);
  const auto order = order_of(t);
  Matrices m{.tensors = {order ? t : t.contiguous()}, .major = order.value_or(Major::kRow)};
  m.view = view(m.tensors[0], what);
  return m;
}

/// E tensors [N, K] that lie alike.
Matrices discrete(at::TensorList list, const char* what) {
  require_alike(list, what);
  Matrices m{.tensors = list.vec(), .discrete = true};
  if (!order_of(list[0]))
    for (Tensor& one : m.tensors) one = one.contiguous();
  const TensorView one = view(m.tensors[0], what);
  m.major = *order_of(m.tensors[0]);
  const int outer = m.major == Major::kRow ? 0 : 1;
  m.view = one;
  m.view.data = nullptr;
  m.view.rank = 3;
  m.view.shape = {int64_t(list.size()), one[0], one[1]};
  m.view.stride = {one[outer] * one.stride[size_t(outer)], one.stride[0], one.stride[1]};
  return m;
}

/// Experts, packed or discrete. Where they have no order, `may_copy` says whether copies are taken.
Matrices experts_of(at::TensorList list, const char* what, bool may_copy) {
  TORCH_CHECK_VALUE(!list.empty(), what, " has no tensors, must have one [E, N, K] or E of [N, K]");
  float_type(list[0].scalar_type(), what);
  const bool packed = list.size() == 1 && list[0].dim() == 3;
  TORCH_CHECK_VALUE(packed || list[0].dim() == 2, what, " has shape ", list[0].sizes(),
                    ", must be [E, N, K] or E of [N, K]");
  Matrices m = packed             ? matrix(list[0], what)
               : list.size() == 1 ? matrix(list[0].unsqueeze(0), what)
                                  : discrete(list, what);
  TORCH_CHECK_VALUE(
      may_copy || m.tensors[0].is_alias_of(list[0]), what, " has strides ", list[0].strides(),
      ", must have stride 1 in a dimension of an expert, and experts one behind another");
  return m;
}

Pass pass_of(c10::string_view which) {
  if (which == "fprop") return Pass::kFprop;
  if (which == "dgrad") return Pass::kDgrad;
  TORCH_CHECK_VALUE(which == "wgrad", "which is '", which, "', must be fprop, dgrad or wgrad");
  return Pass::kWgrad;
}

/// The arguments of the operator, except for the output.
struct GroupedGemmInputs {
  const Tensor& lhs;
  at::TensorList rhs;
  const Tensor& offsets;
  c10::string_view which;
  const Maybe& bias;
  const Maybe& bias_scale;
  const Maybe& alpha;
  int64_t unit_budget;
  c10::string_view accumulate = "no";
  const Maybe& accumulate_flags;
  const Maybe& beta;
  const Maybe& c;
  Tail tail = Tail::kZero;
};

/// N and K of the problem.
struct Widths {
  int64_t n, k;
};

Widths widths_of(const GroupedGemmInputs& in, Pass pass) {
  TORCH_CHECK_VALUE(in.lhs.dim() == 2, "lhs has shape ", in.lhs.sizes(),
                    ", must have 2 dimensions");
  TORCH_CHECK_VALUE(!in.rhs.empty(), "rhs has no tensors, must have 1 or more");
  const Tensor& rhs = in.rhs[0];
  TORCH_CHECK_VALUE(rhs.dim() >= 2, "rhs has shape ", rhs.sizes(), ", must have 2 or 3 dimensions");
  TORCH_CHECK_VALUE(pass != Pass::kWgrad || (in.rhs.size() == 1 && rhs.dim() == 2), "rhs has ",
                    in.rhs.size(), " tensors of ", rhs.dim(),
                    " dimensions, must be one of 2; wgrad contracts the rows of x");
  if (pass == Pass::kFprop) return {rhs.size(-2), in.lhs.size(1)};
  return {in.lhs.size(1), rhs.size(-1)};
}

Format plain_format(DType type) { return parse_format(name(type)); }

/// Sets what is added to the product: accumulation with its flags, and beta times c.
void set_addends(const GroupedGemmInputs& in, GroupedGemmProblem& p, GroupedGemmArgs& args,
                 Matrices& c) {
  p.accumulate = parse_accumulate(in.accumulate);
  const bool each = p.accumulate == Accumulate::kPerExpert;
  const bool flags = each || p.accumulate == Accumulate::kDevice;
  TORCH_CHECK_VALUE(flags == in.accumulate_flags.has_value(), "accumulate_flags is ",
                    flags ? "None" : "given", ", must be ", flags ? "given" : "None",
                    "; accumulate is ", in.accumulate);
  if (flags) {
    const int64_t words = each ? p.experts : 1;
    args.accumulate = written_ints(*in.accumulate_flags, {"accumulate_flags", {words}, in.lhs});
  }
  TORCH_CHECK_VALUE(in.beta.has_value() == in.c.has_value(), "beta is ", in.beta ? "given" : "None",
                    ", must be ", in.c ? "given" : "None", "; beta is the factor of c");
  if (!in.c) return;
  p.beta = true;
  require_type(*in.c, scalar_type(p.out), "c");
  c = matrix(*in.c, "c");
  p.align = std::min(p.align, alignment(c.tensors));
  args.c = c.view;
}

void run_grouped_gemm(const GroupedGemmInputs& in, at::TensorList out) {
  const Tensor& lhs = in.lhs;
  GroupedGemmProblem p{.pass = pass_of(in.which), .rows = lhs.size(0)};
  const Widths widths = widths_of(in, p.pass);
  p.n = widths.n, p.k = widths.k;
  const bool wgrad = p.pass == Pass::kWgrad;
  TORCH_CHECK_VALUE(wgrad || out.size() == 1, "out has ", out.size(), " tensors, must have 1");
  const Matrices a = matrix(lhs, "lhs");
  const Matrices b = wgrad ? matrix(in.rhs[0], "rhs") : experts_of(in.rhs, "rhs", true);
  const Matrices d = wgrad ? experts_of(out, "out", false) : matrix(out[0], "out");
  TORCH_CHECK_VALUE(d.tensors[0].is_alias_of(out[0]), "out has strides ", out[0].strides(),
                    ", must have stride 1 in one dimension, and no overlap");
  const Tensor bias = in.bias ? with_rows(*in.bias, "bias") : Tensor();
  GroupedGemmArgs args{.lhs = {.codes = a.view}, .rhs = {.codes = b.view}, .out = d.view};
  args.offsets = offsets(in.offsets, lhs);
  p.experts = args.offsets.experts;
  p.lhs = plain_format(a.view.dtype), p.rhs = plain_format(b.view.dtype), p.out = d.view.dtype;
  p.lhs_major = a.major, p.rhs_major = b.major, p.out_major = d.major;
  p.discrete_rhs = b.discrete, p.discrete_out = d.discrete;
  p.unit_budget = int_of(in.unit_budget, "unit_budget");
  p.tail = wgrad ? Tail::kKeep : in.tail;
  p.align = std::min({alignment(a.tensors), alignment(b.tensors), alignment(d.tensors)});
  require_same_device(lhs, b.tensors[0], "rhs");
  require_same_device(lhs, d.tensors[0], "out");
  require_same_device(lhs, bias, "bias");
  const Tensor alpha = read_floats(in.alpha, {"alpha", {p.experts}, lhs});
  const Tensor beta = read_floats(in.beta, {"beta", {p.experts}, lhs});
  const Tensor scale = read_floats(in.bias_scale, {"bias_scale", {p.rows}, lhs});
  Matrices c;
  set_addends(in, p, args, c);
  p.alpha = alpha.defined(), p.bias = bias.defined(), p.bias_scale = scale.defined();
  if (p.bias) p.bias_dtype = float_type(bias.scalar_type(), "bias"), args.bias = view(bias, "bias");
  args.alpha = floats(alpha, "alpha");
  args.beta = floats(beta, "beta");
  args.bias_scale = floats(scale, "bias_scale");
  const CurrentStream current(lhs);
  PointerTables tables;
  if (b.discrete) tables.add(b.tensors, args.rhs.discrete);
  if (d.discrete) tables.add(d.tensors, args.discrete_out);
  tables.write(lhs, current);
  launch(p, args, lhs);
}

Tensor new_grouped_gemm(const GroupedGemmInputs& in, std::optional<at::ScalarType> out_dtype) {
  const Pass pass = pass_of(in.which);
  const Widths widths = widths_of(in, pass);
  if (out_dtype) float_type(*out_dtype, "out_dtype");
  const auto options = in.lhs.options().dtype(out_dtype.value_or(in.lhs.scalar_type()));
  const int64_t experts = offsets(in.offsets, in.lhs).experts, rows = in.lhs.size(0);
  Tensor out = pass == Pass::kWgrad   ? at::empty({experts, widths.n, widths.k}, options)
               : pass == Pass::kFprop ? at::empty({rows, widths.n}, options)
                                      : at::empty({rows, widths.k}, options);
  run_grouped_gemm(in, out);
  return out;
}

void implement(torch::Library& m) {
  m.impl("grouped_gemm",
         [](const Tensor& lhs, at::TensorList rhs, const Tensor& offsets, c10::string_view which,
            const Maybe& bias, const Maybe& bias_scale, const Maybe& alpha,
            std::optional<at::ScalarType> out_dtype, int64_t unit_budget) {
           const Maybe none;
           return new_grouped_gemm({.lhs = lhs,
                                    .rhs = rhs,
                                    .offsets = offsets,
                                    .which = which,
                                    .bias = bias,
                                    .bias_scale = bias_scale,
                                    .alpha = alpha,
                                    .unit_budget = unit_budget,
                                    .accumulate_flags = none,
                                    .beta = none,
                                    .c = none},
                                   out_dtype);
         });
  implement_out(
      m, "grouped_gemm",
      +[](const Tensor& lhs, at::TensorList rhs, const Tensor& offsets, c10::string_view which,
          const Maybe& bias, const Maybe& bias_scale, const Maybe& alpha, int64_t unit_budget,
          c10::string_view accumulate, const Maybe& flags, const Maybe& beta, const Maybe& c,
          at::TensorList out) {
        for (const Tensor& t : out) written(t, "out", lhs);
        run_grouped_gemm({lhs, rhs, offsets, which, bias, bias_scale, alpha, unit_budget,
                          accumulate, flags, beta, c, Tail::kKeep},
                         out);
      });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  m.def(
      "grouped_gemm(Tensor lhs, Tensor[] rhs, Tensor offsets, str which, *, Tensor? bias=None, "
      "Tensor? bias_scale=None, Tensor? alpha=None, ScalarType? out_dtype=None, int unit_budget=0) "
      "-> Tensor");
  m.def(
      "grouped_gemm.out(Tensor lhs, Tensor[] rhs, Tensor offsets, str which, *, Tensor? bias=None, "
      "Tensor? bias_scale=None, Tensor? alpha=None, int unit_budget=0, str accumulate='no', "
      "Tensor? accumulate_flags=None, Tensor? beta=None, Tensor? c=None, Tensor(a!)[] out) -> ()");
}
TORCH_LIBRARY_IMPL(cadre, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, CUDA, m) { implement(m); }

}  // namespace cadre::door
