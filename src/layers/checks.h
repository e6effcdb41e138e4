#pragma once
#include <cmath>
#include <string>
#include <string_view>

#include "cadre/layer.h"
#include "cadre/workspace.h"
#include "layers/linear_copies.h"
#include "layers/memory.h"
#include "ops/checks.h"

// What every layer checks before it launches anything.
namespace cadre::layers {

template <class Problem>
void check_memory(const ops::Checks<Problem>& checks, std::string_view what, const Memory& memory,
                  int64_t bytes) {
  checks.holds(memory.bytes >= bytes, what, " is ", memory.bytes, " bytes, must be ", bytes,
               " or more; plan.memory says how much");
  if (bytes == 0) return;
  checks.holds(memory.data != nullptr, what, " is null, must be ", bytes, " bytes");
  checks.aligned(what, memory.data, kAlignment);
}

/// The workspace of a run, and that the plan was made by plan().
template <class Problem>
void check_run(const ops::Checks<Problem>& checks, std::string_view route, Workspace workspace,
               int64_t bytes) {
  checks.holds(!route.empty(), "the plan is empty; make it with plan()");
  check_memory(checks, "workspace", {workspace.data, workspace.bytes}, bytes);
}

/// The fields that the problems of all layers share.
template <class Problem>
void check_types_and_options(const ops::Checks<Problem>& checks, const Problem& p) {
  checks.experts(p.experts);
  checks.plain_float("dtype", p.dtype);
  checks.plain_float("weight", p.parameters.weight);
  checks.plain_float("bias_dtype", p.parameters.bias);
  checks.plain_float("dw", p.parameters.dw);
  checks.plain_float("dbias_dtype", p.parameters.dbias);
  checks.holds(p.options.amax_eps >= 0 && std::isfinite(p.options.amax_eps), "amax_eps is ",
               p.options.amax_eps, ", must be finite and 0 or more");
  checks.at_least("unit_budget", p.options.unit_budget, 0);
  checks.alignment("align", p.options.align);
  require_legal(p.recipe);
}

/// Those of a layer whose weights may come quantised. `learns`: its backward reads weights, or
/// makes their gradients.
template <class Problem>
void check_quantized_w(const ops::Checks<Problem>& checks, bool learns) {
  const Problem& p = checks.problem();
  if (!p.options.quantized_w) return;
  checks.holds(
      !learns,
      "quantized_w is yes, must be no; backward is wanted, which reads weights along rows");
  checks.holds(!p.options.cache_weights, "cache_weights is yes, must be no; w comes quantised");
  checks.holds(
      !p.parameters.discrete_weight,
      "discrete_weight is yes, must be no; w comes as the codes and scales of all experts");
}

template <class Problem>
bool scatters(const Problem& p) {
  if constexpr (requires { p.scatter_dx; }) return p.scatter || p.scatter_dx;
  return p.scatter;
}

/// Those of a layer that may write its output, or the gradient of its input, to places.
template <class Problem>
void check_scatter(const ops::Checks<Problem>& checks) {
  const Problem& p = checks.problem();
  checks.at_least("ranks", p.ranks, 1);
  if (!scatters(p))
    return checks.holds(p.ranks == 1, "ranks is ", p.ranks, ", must be 1; nothing is scattered");
  checks.holds(!p.gather && !p.gather_dy, p.gather ? "gather" : "gather_dy",
               " is yes, must be no; T is of what is gathered or of what is scattered");
  checks.at_least("T", p.tokens, 0);
  checks.at_least("top_k", p.top_k, 1);
}

/// Those of a layer that may read its input, or its gradient, in token order; whether it makes
/// gradients of biases of what is gathered.
template <class Problem>
void check_gather(const ops::Checks<Problem>& checks, bool dbias) {
  const Problem& p = checks.problem();
  const auto as_is = [&](const Format& format) { return linear::as_is(format, p.dtype); };
  checks.holds(p.gather || !p.gather_dw,
               "gather_dw is yes, must be no; the problem says gather=no");
  check_scatter(checks);
  if (scatters(p)) return;
  if (!p.gather && !p.gather_dy) {
    checks.holds(p.tokens == 0, "T is ", p.tokens, ", must be 0; the problem says gather=no");
    checks.holds(p.top_k == 1, "top_k is ", p.top_k, ", must be 1; the problem says gather=no");
    return;
  }
  checks.at_least("T", p.tokens, 1);
  checks.fits_int32("T", p.tokens);
  checks.at_least("top_k", p.top_k, 1);
  checks.fits_int32("T * top_k", p.tokens * p.top_k);
  checks.holds(!p.gather || !p.options.quantized_x,
               "quantized_x is yes, must be no; tokens are quantised as they are gathered");
  checks.holds(!p.gather_dw || as_is(p.recipe.wgrad.rhs),
               "gather_dw is yes, must be no; the recipe quantises x for wgrad");
  checks.holds(!p.gather_dy || (as_is(p.recipe.dgrad.lhs) && as_is(p.recipe.wgrad.lhs)),
               "gather_dy is yes, must be no; the recipe quantises dy");
  checks.holds(!p.gather_dy || !dbias,
               "gather_dy is yes, must be no; the bias's gradient is of rows in expert order");
}

/// Those of a layer whose codes of x along K may come with x.
template <class Problem>
void check_given_x(const ops::Checks<Problem>& checks) {
  const Problem& p = checks.problem();
  if (!p.given_x_along_k) return;
  checks.holds(!linear::as_is(p.recipe.fprop.lhs, p.dtype),
               "given_x_along_k is yes, must be no; the recipe reads x as it is");
  checks.holds(!p.options.quantized_x && !p.gather,
               "given_x_along_k is yes, must be no; quantized_x or gather says how x comes");
}

/// Those of a layer with an activation between its products.
template <class Problem>
void check_keep_h(const ops::Checks<Problem>& checks) {
  const Problem& p = checks.problem();
  checks.holds(p.keep_h || !p.wgrad2 || !p.recipe.wgrad.rhs.stochastic,
               "keep_h is no, must be yes; h is rounded stochastically for wgrad, and computing it "
               "again would give other codes");
}

/// Those of the layers whose rows come in expert order.
template <class Problem>
void check_layer_problem(const ops::Checks<Problem>& checks, const Problem& p) {
  checks.at_least("R", p.rows, 0);
  checks.fits_int32("R", p.rows);
  check_types_and_options(checks, p);
}

}  // namespace cadre::layers
