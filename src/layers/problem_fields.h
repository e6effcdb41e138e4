#pragma once
#include "ops/problem_text.h"

// The fields that the problems of several layers print alike.
namespace cadre::layers {

template <class Io, class Problem>
void parameter_fields(Io& io, Problem& p) {
  const ParameterLayout usual;
  auto& own = p.parameters;
  io.unless("dtype", p.dtype, DType::kBf16);
  io.unless("weight", own.weight, usual.weight);
  io.unless("weight_major", own.weight_major, usual.weight_major);
  io.unless("bias_dtype", own.bias, usual.bias);
  io.unless("dw", own.dw, usual.dw);
  io.unless("dbias_dtype", own.dbias, usual.dbias);
  io.unless("discrete_weight", own.discrete_weight, usual.discrete_weight);
  io.unless("discrete_bias", own.discrete_bias, usual.discrete_bias);
  io.unless("discrete_dw", own.discrete_dw, usual.discrete_dw);
}

/// The sizes of experts, what they compute and in which types.
template <class Io, class Problem>
void expert_fields(Io& io, Problem& p) {
  io.always("H", p.hidden);
  io.always("F", p.features);
  io.always("E", p.experts);
  io.always("act", p.activation);
  io.unless("layout", p.layout, GluLayout::kConcat);
  ops::constant_fields(io, p.activation, p.constants);
  io.always("recipe", p.recipe);
  parameter_fields(io, p);
}

/// Of a layer that may read its input, or its gradient, in token order, or write to places.
template <class Io, class Problem>
void gather_fields(Io& io, Problem& p) {
  io.unless("gather", p.gather, false);
  io.unless("gather_dw", p.gather_dw, false);
  io.unless("gather_dy", p.gather_dy, false);
  io.unless("scatter", p.scatter, false);
  if constexpr (requires { p.scatter_dx; }) io.unless("scatter_dx", p.scatter_dx, false);
  io.unless("T", p.tokens, int64_t{0});
  io.unless("top_k", p.top_k, 1);
  io.unless("ranks", p.ranks, 1);
}

template <class Io, class Problem>
void option_fields(Io& io, Problem& p) {
  const LayerOptions usual;
  auto& own = p.options;
  io.unless("accumulate", own.accumulate, usual.accumulate);
  io.unless("accumulate_bias", own.accumulate_bias, usual.accumulate_bias);
  io.unless("deferred", own.deferred, usual.deferred);
  io.unless("quantized_x", own.quantized_x, usual.quantized_x);
  io.unless("quantized_w", own.quantized_w, usual.quantized_w);
  io.unless("save_input", own.save_input, usual.save_input);
  io.unless("cache_weights", own.cache_weights, usual.cache_weights);
  io.unless("overwrite_saved", own.overwrite_saved, usual.overwrite_saved);
  io.unless("tail", own.tail, usual.tail);
  io.unless("amax_eps", own.amax_eps, usual.amax_eps);
  io.unless("unit_budget", own.unit_budget, usual.unit_budget);
  io.unless("align", own.align, usual.align);
}

}  // namespace cadre::layers
