// What a call of moe means: its problem, checked, and the memory that problem needs.
#include <algorithm>
#include <string>
#include <tuple>

#include "arguments.h"
#include "moe.h"
#include "words.h"

namespace cadre::door {
namespace {

MoeProblem problem_of(const GroupedMlpProblem& mlp, const RoutingProblem& choice) {
  MoeProblem p{.hidden = mlp.hidden, .features = mlp.features, .experts = mlp.experts};
  p.activation = mlp.activation;
  p.constants = mlp.constants;
  p.layout = mlp.layout;
  p.recipe = mlp.recipe;
  p.dtype = mlp.dtype;
  p.parameters = mlp.parameters;
  p.score = choice.score;
  p.normalize = choice.normalize;
  p.scale = choice.scale;
  p.groups = choice.groups;
  p.group_top_k = choice.group_top_k;
  p.bias1 = mlp.bias1;
  p.bias2 = mlp.bias2;
  p.dgrad = mlp.dgrad;
  p.dlogits = mlp.dprob;
  p.wgrad1 = mlp.wgrad1;
  p.wgrad2 = mlp.wgrad2;
  p.dbias = mlp.dbias;
  p.keep_h = mlp.keep_h;
  p.options = mlp.options;
  return p;
}

/// Bounds of the bytes of saved and of pending, each fixed and per token.
std::vector<int64_t> moe_memory_bounds(int64_t hidden, int64_t features, int64_t experts,
                                       int64_t top_k, at::ScalarType dtype,
                                       at::ScalarType weight_dtype, std::array<bool, 2> biases,
                                       MoeWants wants, Text activation, Text recipe, bool keep_h,
                                       bool keep_rows, int64_t shared_features, bool shared_gate,
                                       Text device) {
  return translate_errors([&] {
    GroupedMlpProblem mlp = problem_with_activation(activation);
    mlp.hidden = hidden;
    mlp.features = features;
    mlp.experts = int(experts);
    mlp.dtype = float_type(dtype, "x");
    mlp.recipe = parse_recipe(recipe.empty() ? name(mlp.dtype) : recipe);
    mlp.parameters.weight = float_type(weight_dtype, "weight1");
    mlp.bias1 = biases[0];
    mlp.bias2 = biases[1];
    mlp.dgrad = wants[kDx];
    mlp.dprob = wants[kDlogits];
    mlp.wgrad1 = wants[kDw1];
    mlp.wgrad2 = wants[kDw2];
    mlp.dbias = wants[kDbias];
    mlp.keep_h = keep_h;
    mlp.options.deferred = true;
    MoeProblem p = problem_of(mlp, {});
    p.top_k = int_of(top_k, "top_k");
    p.keep_rows = keep_rows;
    p.shared_features = shared_features;
    p.shared_gate = shared_gate;
    const MemoryBounds bounds = memory_bounds_of_any_rows(p, parse_device(device));
    return std::vector<int64_t>{bounds.saved.fixed, bounds.saved.per_row, bounds.pending.fixed,
                                bounds.pending.per_row};
  });
}

void require_shared(const at::Tensor& weight, const char* what, at::IntArrayRef shape,
                    const MoeCall& call) {
  const at::Tensor& like = call.weight1[0];
  require_same_device(call.x, weight, what);
  require_type(weight, like.scalar_type(), what);
  require_memory(weight, what);
  TORCH_CHECK_VALUE(weight.sizes() == shape, what, " has shape ", weight.sizes(), ", must be ",
                    shape, ", as a weight of one expert");
  const bool line = shape[0] == 1 || shape[1] == 1;  // lies in either order
  TORCH_CHECK_VALUE(line || major_of(weight) == major_of(like), what, " has strides ",
                    weight.strides(), ", must lie as weight1 with strides ", like.strides(),
                    ": both transposed, or neither");
}

void add_shared_expert(MoeProblem& p, const MoeCall& call) {
  const auto& [one, two, gate] = std::tie(call.shared1, call.shared2, call.shared_gate);
  TORCH_CHECK_VALUE(one.has_value() == two.has_value(), "shared_weight1 and shared_weight2 are ",
                    one ? "given" : "None", " and ", two ? "given" : "None",
                    ", must both be given, or neither");
  TORCH_CHECK_VALUE(one || !gate, "shared_gate is given, must be None; there is no shared expert");
  if (!one) return;
  TORCH_CHECK_VALUE(two->dim() == 2, "shared_weight2 has shape ", two->sizes(), ", must be [H, F]");
  p.shared_features = two->size(1);
  p.shared_gate = gate.has_value();
  const int64_t columns = p.shared_features * (info(p.activation).gated ? 2 : 1);
  require_shared(*two, "shared_weight2", {p.hidden, p.shared_features}, call);
  require_shared(*one, "shared_weight1", {columns, p.hidden}, call);
  p.options.align = std::min(p.options.align, alignment({*one, *two}));
  if (gate) require(*gate, {"shared_gate", {p.tokens}, call.x});
}

}  // namespace

const RoutingProblem& routing_of(std::string_view words) {
  static thread_local std::string last;  // whose problem this is: most models have one kind
  static thread_local RoutingProblem problem;
  if (last.empty() || last != words) {
    const auto stated = parse_routing_problem(text("routing forward ", words, " T=1 E=1 top_k=1"));
    require_names("routing", words, {"normalize", "scale", "groups", "group_top_k"});
    problem = stated;
    last = words;
  }
  return problem;
}

/// The experts of any of these calls.
static GroupedMlpProblem mlp_of(const auto& call) {
  const std::optional<at::Tensor> none;
  const auto& [dx, dlogits, dw1, dw2, dbias] = call.wants;
  return problem_of(MlpCall{call.x,
                            call.offsets,
                            none,
                            call.weight1,
                            call.bias1,
                            call.weight2,
                            call.bias2,
                            none,
                            call.rng,
                            {dx, dlogits, dw1, dw2, dbias, false},
                            call.activation,
                            call.recipe,
                            call.keep_h});
}

Choice read_choice(const at::Tensor& experts, const at::Tensor& prob, const at::Tensor& x) {
  TORCH_CHECK_VALUE(experts.dim() == 2, "experts has shape ", experts.sizes(),
                    ", must be [T, top_k]");
  const DType index = index_type(experts.scalar_type(), "experts");
  TORCH_CHECK_VALUE(experts.size(1) >= 1, "experts has shape ", experts.sizes(),
                    ", must have a column or more: those that a token has chosen");
  const std::array<int64_t, 2> choices{x.size(0), experts.size(1)};
  require(experts, {"experts", choices, x});
  require_memory(experts, "experts");
  return {experts.contiguous(), read_floats(prob, {"prob", choices, x}), index};
}

MoeProblem routed_problem(const GroupedMlpProblem& mlp) {
  MoeProblem p = problem_of(mlp, {});
  p.routed = true;
  return p;
}

MoeProblem problem_of(const RoutedCall& call) {
  MoeProblem p = routed_problem(mlp_of(call));
  p.tokens = call.x.size(0);
  p.top_k = int_of(call.top_k, "top_k");
  p.keep_rows = call.keep_rows;
  return p;
}

MoeProblem problem_of(const MoeCall& call) {
  require(call.logits, {"logits", {call.x.size(0), call.offsets.size(0) - 1}, call.x});
  MoeProblem p = problem_of(mlp_of(call), routing_of(call.routing));
  p.tokens = call.x.size(0);
  p.top_k = int(call.experts.size(1));
  p.logits = float_type(call.logits.scalar_type(), "logits");
  p.keep_rows = call.keep_rows;
  add_shared_expert(p, call);
  return p;
}

bool learns(const MoeProblem& p) {
  return p.dgrad || p.dlogits || p.wgrad1 || p.wgrad2 || (p.dbias && (p.bias1 || p.bias2));
}

at::Tensor rows_for(const at::Tensor& t, const char* what, int align) {
  const at::Tensor rows = rows_of(t, what);
  return alignment({rows}) < align ? rows.clone(at::MemoryFormat::Contiguous) : rows;
}

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  m.def(
      "_moe_memory_bounds(int hidden, int features, int experts, int top_k, ScalarType dtype, "
      "ScalarType weight_dtype, bool[2] biases, bool[5] wants, str activation, str recipe, "
      "bool keep_h, bool keep_rows, int shared_features, bool shared_gate, str device) -> int[]",
      moe_memory_bounds);
}

}  // namespace cadre::door
