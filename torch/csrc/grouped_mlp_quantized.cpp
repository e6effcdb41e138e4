#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <algorithm>
#include <bit>

#include "arguments.h"
#include "call_memory.h"
#include "expert_launch.h"
#include "moe.h"
#include "quantized.h"

// torch.ops.cadre.grouped_mlp_quantized and routed_experts_quantized: forward of
// docs/layers/grouped_mlp.md, and of moe.md for tokens that have chosen, with weights that are
// codes and scales, as checkpoints have them.
namespace cadre::door {
namespace {

/// What both operators are called with.
struct QuantizedCall {
  const Tensor& x;                            ///< [R, H], contiguous
  const Maybe& prob;                          ///< of rows
  TensorList weight1, bias1, weight2, bias2;  ///< weights: codes, scales and scales of experts
  const Maybe& bias2_scale;
};

/// The codes and scales of one of the weights.
class QuantizedWeight {
 public:
  QuantizedWeight(TensorList parts, const char* what) : what_(what) {
    TORCH_CHECK_VALUE(parts.size() == 2 || parts.size() == 3, what, " has ", parts.size(),
                      " tensors, must have codes, scales and, where the format has them, scales of "
                      "experts");
    for (size_t i = 0; i < 2; ++i) tensors_[i] = parts[i];
    // What quantize returns is empty where the format has no such scales.
    if (parts.size() == 3 && parts[2].sym_numel() != 0) tensors_[2] = parts[2];
    TORCH_CHECK_VALUE(codes().dim() == 3, what, " has codes of shape ", codes().sizes(),
                      ", must have [E, N, K], of four bits two a byte");
  }
  const Tensor& codes() const { return tensors_[0]; }
  int64_t rows() const { return codes().size(1); }
  /// Of the address, in bytes up to 16. Steps follow from the shape, as those who want some know.
  int alignment() const {
    return 1 << std::countr_zero(reinterpret_cast<uintptr_t>(codes().data_ptr()) | 16);
  }
  int64_t columns(const Format& format) const {
    return codes().size(2) * (8 / bits(format.element));
  }
  /// As the library sees it. `none` stands for parts that the format does not have.
  QuantizedView view(const QuantizedShape& shape, const Tensor& on) const {
    const FormatInfo& row = info(shape.format.kind);
    const Tensor none = codes().new_empty({0}, codes().options().dtype(at::kFloat));
    TORCH_CHECK_VALUE(tensors_[2].defined() == row.has_expert_scale, what_, " has ",
                      tensors_[2].defined() ? "" : "no ", "scales of experts, must have ",
                      row.has_expert_scale ? "them, as the third tensor" : "none",
                      "; the format is ", to_string(shape.format));
    return door::view({typed(codes(), shape.format.element), typed(tensors_[1], row.scale),
                       row.has_expert_scale ? tensors_[2] : none},
                      shape, on);
  }

 private:
  /// Bytes as what they stand for: checkpoints have no types for such.
  static Tensor typed(const Tensor& t, DType type) {
    return t.scalar_type() == at::kByte && bits(type) <= 8 ? t.view(scalar_type(type)) : t;
  }

  const char* what_;
  Tensor tensors_[3];
};

void add_bias(bool& has, DType& type, TensorList bias, const QuantizedWeight& weight,
              const QuantizedCall& call, const char* what) {
  has = !bias.empty();
  if (!has) return;
  TORCH_CHECK_VALUE(bias.size() == 1, what, " has ", bias.size(),
                    " tensors, must have one, of all experts");
  require(bias[0], {what, {weight.codes().size(0), weight.rows()}, call.x});
  type = float_type(bias[0].scalar_type(), what);
}

/// The problem that a call states. Errors    ValueError for tensors that do not fit together.
GroupedMlpProblem problem_of(const QuantizedCall& call, Text recipe, Text activation,
                             const QuantizedWeight& w1, const QuantizedWeight& w2) {
  GroupedMlpProblem p = problem_with_activation(activation);
  p.recipe = recipe_of(recipe);
  const Format& format = p.recipe.fprop.rhs;
  TORCH_CHECK_VALUE(!is_plain(format), "recipe is ", recipe, ", must have codes of weights in ",
                    "fprop, as mxfp4 has; it reads them as they are");
  p.rows = call.x.size(0);
  p.hidden = w1.columns(format);
  p.features = w2.columns(format);
  p.experts = int(w1.codes().size(0));
  const int64_t columns = info(p.activation).gated ? 2 * p.features : p.features;
  TORCH_CHECK_VALUE(call.x.size(1) == p.hidden && w2.rows() == p.hidden && w1.rows() == columns &&
                        w2.codes().size(0) == p.experts,
                    "x and the codes of weight1 and weight2 have shapes ", call.x.sizes(), ", ",
                    w1.codes().sizes(), " and ", w2.codes().sizes(), ", must be of [R, H], [E, ",
                    columns, ", H] and [E, H, ", p.features, "], in ", to_string(format));
  p.dtype = float_type(call.x.scalar_type(), "x");
  p.options.quantized_w = true;
  p.options.tail = Tail::kZero;
  p.options.align = std::min({alignment({call.x}), w1.alignment(), w2.alignment()});
  p.dgrad = p.dprob = p.wgrad1 = p.wgrad2 = p.dbias = false;
  add_bias(p.bias1, p.parameters.bias, call.bias1, w1, call, "bias1");
  add_bias(p.bias2, p.parameters.bias, call.bias2, w2, call, "bias2");
  TORCH_CHECK_TYPE(
      !p.bias1 || !p.bias2 || call.bias1[0].scalar_type() == call.bias2[0].scalar_type(),
      "bias2 is ", dtype_name(call.bias2[0].scalar_type()), ", must be ",
      dtype_name(call.bias1[0].scalar_type()), " as bias1");
  TORCH_CHECK_VALUE(p.bias2 || !call.bias2_scale,
                    "bias2_scale is given, must be None; bias2 is empty");
  p.prob = call.prob.has_value();
  p.bias2_scale = call.bias2_scale.has_value();
  if (call.prob) require(*call.prob, {"prob", {p.rows}, call.x});
  if (call.bias2_scale) require(*call.bias2_scale, {"bias2_scale", {p.rows}, call.x});
  return p;
}

void bind(LinearParameters& to, const QuantizedWeight& weight, const Format& format,
          TensorList bias, const Tensor& on) {
  const QuantizedShape shape{RowsKind::kWeights, weight.rows(), weight.columns(format),
                             int(weight.codes().size(0)), format};
  to.quantized_w = weight.view(shape, on);
  if (!bias.empty()) to.bias = view(bias[0], "bias");
}

Tensor grouped_mlp_quantized(const Tensor& x, const Tensor& offsets, const Maybe& prob,
                             TensorList weight1, TensorList bias1, TensorList weight2,
                             TensorList bias2, const Maybe& bias2_scale, Text recipe,
                             Text activation, int64_t unit_budget) {
  return translate_errors([&] {
    const Tensor rows = rows_of(x, "x");
    const QuantizedCall call{rows, prob, weight1, bias1, weight2, bias2, bias2_scale};
    const QuantizedWeight w1(weight1, "weight1"), w2(weight2, "weight2");
    GroupedMlpProblem p = problem_of(call, recipe, activation, w1, w2);
    p.options.unit_budget = int_of(unit_budget, "unit_budget");
    ExpertLaunch<GroupedMlpProblem, GroupedMlpArgs> mlp(p, rows);
    bind(mlp.fc1.parameters, w1, p.recipe.fprop.rhs, bias1, rows);
    bind(mlp.fc2.parameters, w2, p.recipe.fprop.rhs, bias2, rows);
    mlp.args.offsets = door::offsets(offsets, rows);
    mlp.args.prob = floats(prob, "prob");
    mlp.args.bias2_scale = floats(bias2_scale, "bias2_scale");
    const Tensor y = at::empty(rows.sizes(), rows.options());
    mlp.args.y = view(y, rows, "y");
    mlp.run(kForward, &LayerMemory::forward_workspace_bytes);
    return y;
  });
}

Tensor routed_experts_quantized(const Tensor& x, const Tensor& experts, const Tensor& prob,
                                TensorList weight1, TensorList bias1, TensorList weight2,
                                TensorList bias2, Text recipe, Text activation) {
  return translate_errors([&] {
    const Tensor tokens = rows_of(x, "x");
    const Choice choice = read_choice(experts, prob, x);
    const Maybe none;
    const QuantizedCall call{tokens, none, weight1, bias1, weight2, bias2, none};
    const QuantizedWeight w1(weight1, "weight1"), w2(weight2, "weight2");
    MoeProblem p = routed_problem(problem_of(call, recipe, activation, w1, w2));
    p.options.tail = Tail::kKeep;
    p.index = choice.index;
    p.tokens = tokens.size(0);
    p.top_k = int_of(choice.top_k(), "top_k");
    ExpertLaunch<MoeProblem, MoeArgs> moe(p, tokens);
    bind(moe.fc1.parameters, w1, p.recipe.fprop.rhs, bias1, tokens);
    bind(moe.fc2.parameters, w2, p.recipe.fprop.rhs, bias2, tokens);
    const Tensor offsets = at::empty({p.experts + 1}, x.options().dtype(at::kInt));
    moe.args.choice = choice.experts.data_ptr();
    moe.args.choice_prob = floats(choice.prob, "prob");
    moe.args.offsets = offsets.data_ptr<int32_t>();
    const Tensor out = at::empty(tokens.sizes(), tokens.options());
    moe.args.out = view(out, tokens, "out");
    moe.run(kForward, &LayerMemory::forward_workspace_bytes);
    return out;
  });
}

void implement(torch::Library& m) {
  m.impl("grouped_mlp_quantized", grouped_mlp_quantized);
  m.impl("routed_experts_quantized", routed_experts_quantized);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  m.def(
      "routed_experts_quantized(Tensor x, Tensor experts, Tensor prob, Tensor[] weight1, "
      "Tensor[] bias1, Tensor[] weight2, Tensor[] bias2, *, str recipe, "
      "str activation=\"swiglu\") -> Tensor");
  m.def(
      "grouped_mlp_quantized(Tensor x, Tensor offsets, Tensor? prob, Tensor[] weight1, "
      "Tensor[] bias1, Tensor[] weight2, Tensor[] bias2, Tensor? bias2_scale=None, *, str recipe, "
      "str activation=\"swiglu\", int unit_budget=0) -> Tensor");
}
// A gradient would be lost in silence.
TORCH_LIBRARY_IMPL(cadre, Autograd, m) {
  m.impl("grouped_mlp_quantized", torch::autograd::autogradNotImplementedFallback());
  m.impl("routed_experts_quantized", torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(cadre, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, CUDA, m) { implement(m); }

}  // namespace cadre::door
