// The problem of a grouped linear layer as text, and what must hold of it.
#include "cadre/grouped_linear.h"
#include "layers/checks.h"
#include "layers/grouped_linear.h"
#include "layers/linear_copies.h"
#include "layers/problem_fields.h"
#include "ops/gemm_activation.h"

namespace cadre {

template <class Io, class Problem>
static void fields(Io& io, Problem& p) {
  const GroupedLinearProblem usual;
  io.always("R", p.rows);
  io.always("N", p.n);
  io.always("K", p.k);
  io.always("E", p.experts);
  io.always("recipe", p.recipe);
  layers::parameter_fields(io, p);
  io.unless("bias", p.bias, usual.bias);
  io.unless("bias_scale", p.bias_scale, usual.bias_scale);
  io.unless("return_bias", p.return_bias, usual.return_bias);
  io.unless("dgrad", p.dgrad, usual.dgrad);
  io.unless("wgrad", p.wgrad, usual.wgrad);
  io.unless("dbias", p.dbias, usual.dbias);
  io.unless("given_x_along_k", p.given_x_along_k, usual.given_x_along_k);
  io.unless("given_dy_along_k", p.given_dy_along_k, usual.given_dy_along_k);
  layers::gather_fields(io, p);
  layers::option_fields(io, p);
  ops::activation_fields(io, p.activation);
  io.unless("x_role", p.x_role, usual.x_role);
  io.unless("dy_role", p.dy_role, usual.dy_role);
}

std::string to_string(const GroupedLinearProblem& p) {
  return ops::write_problem("grouped_linear", p);
}

GroupedLinearProblem parse_grouped_linear_problem(std::string_view words) {
  return ops::read_problem<GroupedLinearProblem>("grouped_linear", words);
}

namespace layers {

using linear::as_is;

void check_problem(const GroupedLinearProblem& p) {
  ops::require_words(p);
  const ops::Checks checks("grouped_linear", p);
  check_layer_problem(checks, p);
  checks.at_least("N", p.n, 1);
  checks.at_least("K", p.k, 1);
  checks.countable("R * N", {p.rows, p.n});
  checks.countable("R * K", {p.rows, p.k});
  checks.countable("E * N * K", {p.experts, p.n, p.k});
  checks.holds(p.bias || !p.bias_scale, "bias_scale is yes, must be no; the problem has no bias");
  checks.holds(p.bias || !p.return_bias, "return_bias is yes, must be no; the problem has no bias");
  checks.holds(!p.return_bias || !p.bias_scale,
               "bias_scale is yes, must be no; a returned bias is scaled by the caller");
  checks.holds(!p.return_bias || !p.activation,
               "return_bias is yes, must be no; the bias comes before the activation");
  const bool w_as_is = as_is(p.recipe.fprop.rhs, p.parameters.weight) &&
                       (!p.dgrad || as_is(p.recipe.dgrad.rhs, p.parameters.weight));
  checks.holds(p.parameters.weight_major == Major::kRow || w_as_is,
               "weight_major is column, must be row; the recipe copies the weights");
  const bool x_as_is =
      as_is(p.recipe.fprop.lhs, p.dtype) && (!p.wgrad || as_is(p.recipe.wgrad.rhs, p.dtype));
  check_gather(checks, p.bias && !p.return_bias && p.dbias);
  checks.holds(!p.gather_dy || !p.gather_dw || !p.wgrad,
               "gather_dy is yes, must be no; gather_dw is yes, and wgrad gathers one operand");
  check_given_x(checks);
  checks.holds(!p.given_dy_along_k || (p.dgrad && !as_is(p.recipe.dgrad.lhs, p.dtype)),
               "given_dy_along_k is yes, must be no; no product reads codes of dy along K");
  checks.holds(!p.options.quantized_x || !x_as_is,
               "quantized_x is yes, must be no; the recipe reads x as it is");
  checks.holds(!p.options.quantized_x || !p.options.save_input,
               "save_input is yes, must be no; x comes quantised and is not quantised again");
  check_quantized_w(checks, p.dgrad || p.wgrad);
  checks.holds(!p.options.quantized_w || !as_is(p.recipe.fprop.rhs, p.parameters.weight),
               "quantized_w is yes, must be no; the recipe reads w as it is");
  checks.holds(!p.options.save_input || !p.wgrad || !p.recipe.wgrad.rhs.stochastic,
               "save_input is yes, must be no; x is rounded stochastically for wgrad, and a second "
               "quantisation would give other codes");
}

}  // namespace layers
}  // namespace cadre
