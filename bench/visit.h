#pragma once
#include <algorithm>
#include <string_view>

#include "bench/case.h"
#include "cadre/error.h"

namespace cadre::bench {

/// Parses a problem of any operation and calls `visit(problem)`.
/// Errors    InvalidArgument from parsing, or listing the operations.
template <class Visit>
auto visit_problem(std::string_view words, Visit&& visit) {
  const size_t start = std::min(words.find_first_not_of(" \t"), words.size());
  const std::string_view name = words.substr(start, words.find_first_of(" \t", start) - start);
  if (name == "activation") return visit(parse_activation_problem(words));
  if (name == "bias_grad") return visit(parse_bias_grad_problem(words));
  if (name == "dequantize") return visit(parse_dequantize_problem(words));
  if (name == "grouped_gemm") return visit(parse_grouped_gemm_problem(words));
  if (name == "offsets") return visit(parse_offsets_problem(words));
  if (name == "permute") return visit(parse_permute_problem(words));
  if (name == "quantize") return visit(parse_quantize_problem(words));
  if (name == "routing") return visit(parse_routing_problem(words));
  throw InvalidArgument(text("problem: operation is '", name,
                             "', must be one of activation, bias_grad, dequantize, grouped_gemm, "
                             "offsets, permute, quantize, routing; layers are rows of "
                             "these"));
}

}  // namespace cadre::bench
