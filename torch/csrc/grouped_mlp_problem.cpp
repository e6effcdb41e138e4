// What a call of grouped_mlp means: its problem, checked, and the memory that problem needs.
#include <algorithm>

#include "arguments.h"
#include "grouped_mlp.h"

namespace cadre::door {
namespace {

void set_wants(GroupedMlpProblem& p, const MlpWants& wants) {
  p.dgrad = wants[kDx];
  p.dprob = wants[kDprob];
  p.wgrad1 = wants[kDw1];
  p.wgrad2 = wants[kDw2];
  p.dbias = wants[kDbias] || wants[kDbias2Scale];
}

/// Bounds of the bytes of saved and of pending, each fixed and per row.
std::vector<int64_t> grouped_mlp_memory_bounds(int64_t hidden, int64_t features, int64_t experts,
                                               at::ScalarType dtype, at::ScalarType weight_dtype,
                                               std::array<bool, 2> biases, bool prob,
                                               MlpWants wants, Text activation, Text recipe,
                                               bool keep_h, bool x_in_codes, Text device) {
  return translate_errors([&] {
    GroupedMlpProblem p = problem_with_activation(activation);
    p.hidden = hidden;
    p.features = features;
    p.experts = int(experts);
    p.dtype = float_type(dtype, "x");
    p.recipe = parse_recipe(recipe.empty() ? name(p.dtype) : recipe);
    p.parameters.weight = float_type(weight_dtype, "weight1");
    p.bias1 = biases[0];
    p.bias2 = biases[1];
    p.prob = prob;
    p.keep_h = keep_h;
    p.given_x_along_k = x_in_codes;
    p.options.deferred = true;
    set_wants(p, wants);
    const MemoryBounds bounds = memory_bounds_of_any_rows(p, parse_device(device));
    return std::vector<int64_t>{bounds.saved.fixed, bounds.saved.per_row, bounds.pending.fixed,
                                bounds.pending.per_row};
  });
}

/// Whether a step of such an MLP can push its results to places of several ranks.
bool grouped_mlp_scatters(int64_t rows, int64_t hidden, int64_t features, int64_t experts,
                          int64_t ranks, at::ScalarType dtype, at::ScalarType weight_dtype,
                          std::array<bool, 2> biases, Text activation, Text recipe, bool x_in_codes,
                          Text device) {
  return translate_errors([&] {
    GroupedMlpProblem p = problem_with_activation(activation);
    p.rows = rows;
    p.hidden = hidden;
    p.features = features;
    p.experts = int(experts);
    p.dtype = float_type(dtype, "x");
    p.recipe = parse_recipe(recipe.empty() ? name(p.dtype) : recipe);
    p.parameters.weight = p.parameters.dw = float_type(weight_dtype, "weight1");
    p.bias1 = biases[0];
    p.bias2 = p.bias2_scale = biases[1];
    p.prob = p.scatter = true;
    p.tokens = 1;
    p.ranks = int(ranks);
    p.given_x_along_k = x_in_codes;
    try {
      plan(p, parse_device(device));
      return true;
    } catch (const Unsupported&) {
      return false;
    }
  });
}

void require_alike(const Parameters& one, const Parameters& two, bool majors) {
  require_type(two.first(), one.first().scalar_type(), two.what);
  TORCH_CHECK_VALUE(one.discrete == two.discrete, two.what, " is ",
                    two.discrete ? "discrete" : "packed", ", must be ",
                    one.discrete ? "discrete" : "packed", " as ", one.what);
  TORCH_CHECK_VALUE(!majors || major_of(one.first()) == major_of(two.first()), two.what,
                    " has strides ", two.first().strides(), ", must lie as ", one.what,
                    " with strides ", one.first().strides(), ": both transposed, or neither");
}

void add_biases(GroupedMlpProblem& p, const MlpCall& call) {
  p.bias1 = !call.bias1.empty();
  p.bias2 = !call.bias2.empty();
  if (!p.bias1 && !p.bias2) return;
  const Parameters one(p.bias1 ? call.bias1 : call.bias2, p.bias1 ? "bias1" : "bias2", call.offsets,
                       1);
  if (p.bias1 && p.bias2) require_alike(one, {call.bias2, "bias2", call.offsets, 1}, false);
  const auto require_width = [](at::TensorList bias, const char* what, int64_t width) {
    TORCH_CHECK_VALUE(bias.empty() || bias[0].size(-1) == width, what, " has shape ",
                      bias[0].sizes(), ", must end in ", width, ", the rows of an expert's weight");
  };
  require_width(call.bias1, "bias1", call.weight1[0].size(-2));
  require_width(call.bias2, "bias2", call.weight2[0].size(-2));
  for (at::TensorList bias : {call.bias1, call.bias2})
    if (!bias.empty()) require_same_device(call.x, bias[0], "bias");
  p.parameters.bias = p.parameters.dbias = one.dtype();
  p.parameters.discrete_bias = one.discrete;
  p.bias2_scale = call.bias2_scale.has_value();
}

}  // namespace

GroupedMlpProblem problem_of(const MlpCall& call) {
  const Parameters w1(call.weight1, "weight1", call.offsets, 2);
  const Parameters w2(call.weight2, "weight2", call.offsets, 2);
  require_alike(w1, w2, true);
  require_same_device(call.x, w1.first(), "weight1");
  require_same_device(call.x, w2.first(), "weight2");
  GroupedMlpProblem p = problem_with_activation(call.activation);
  p.rows = call.x.size(0);
  p.hidden = w1.first().size(-1);
  p.features = w2.first().size(-1);
  const int64_t columns = info(p.activation).gated ? 2 * p.features : p.features;
  TORCH_CHECK_VALUE(call.x.size(1) == p.hidden && w2.first().size(-2) == p.hidden &&
                        w1.first().size(-2) == columns,
                    "x, weight1 and weight2 have shapes ", call.x.sizes(), ", ", w1.first().sizes(),
                    " and ", w2.first().sizes(), ", must end in [R, H], [", columns,
                    ", H] and [H, ", p.features, "]; ", info(p.activation).name, " is ",
                    info(p.activation).gated ? "gated" : "not gated");
  p.experts = w1.experts;
  p.dtype = float_type(call.x.scalar_type(), "x");
  p.recipe = recipe_or_default(call.recipe, call.x);
  p.parameters.weight = p.parameters.dw = w1.dtype();
  p.parameters.weight_major = major_of(w1.first());
  p.parameters.discrete_weight = p.parameters.discrete_dw = w1.discrete;
  p.prob = call.prob.has_value();
  p.keep_h = call.keep_h;
  p.given_x_along_k = call.x_in_codes;
  p.options.unit_budget = int_of(call.unit_budget, "unit_budget");
  p.options.align =
      std::min({alignment({call.x}), alignment(call.weight1), alignment(call.weight2)});
  TORCH_CHECK_VALUE(!call.bias2.empty() || !call.bias2_scale,
                    "bias2_scale is given, must be None; bias2 is empty");
  add_biases(p, call);
  set_wants(p, call.wants);
  if (call.prob) require(*call.prob, {"prob", {p.rows}, call.x});
  if (call.bias2_scale) require(*call.bias2_scale, {"bias2_scale", {p.rows}, call.x});
  return p;
}

void plan_dw(ParameterLayout& layout, LayerOptions& options, const ExpertDw& dw,
             const at::Tensor& offsets) {
  const Parameters dw1(dw.dweight1, "dweight1", offsets, 2);
  const Parameters dw2(dw.dweight2, "dweight2", offsets, 2);
  require_alike(dw1, dw2, false);
  require_fits(dw1, dw.weight1[0]);
  require_fits(dw2, dw.weight2[0]);
  layout.dw = dw1.dtype();
  layout.discrete_dw = dw1.discrete;
  options.accumulate = parse_accumulate(dw.accumulate);
  options.align = std::min({options.align, alignment(dw.dweight1), alignment(dw.dweight2)});
}

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  m.def(
      "_grouped_mlp_memory_bounds(int hidden, int features, int experts, ScalarType dtype, "
      "ScalarType weight_dtype, bool[2] biases, bool prob, bool[6] wants, str activation, str "
      "recipe, bool keep_h, bool x_in_codes, str device) -> int[]",
      grouped_mlp_memory_bounds);
  m.def(
      "_grouped_mlp_scatters(int rows, int hidden, int features, int experts, int ranks, "
      "ScalarType dtype, ScalarType weight_dtype, bool[2] biases, str activation, str recipe, "
      "bool x_in_codes, str device) -> bool",
      grouped_mlp_scatters);
}

}  // namespace cadre::door
