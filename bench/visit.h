#pragma once
#include <algorithm>
#include <string_view>
#include <type_traits>
#include <vector>

#include "bench/case.h"
#include "cadre/error.h"

namespace cadre::bench {

/// The first word of a problem.
inline std::string_view operation_of(std::string_view problem) {
  const size_t start = std::min(problem.find_first_not_of(" \t"), problem.size());
  return problem.substr(start, problem.find_first_of(" \t", start) - start);
}

/// Throws InvalidArgument that lists the operations.
[[noreturn]] void refuse_operation(std::string_view name);

template <class First, class... Others, class Visit>
auto visit_problem_of(TypeList<First, Others...>, std::string_view words, Visit&& visit) {
  if (operation_of(words) == First::kText.name) return visit(First::parse(words));
  if constexpr (sizeof...(Others) > 0)
    return visit_problem_of(TypeList<Others...>{}, words, visit);
  else
    refuse_operation(operation_of(words));
}

/// Parses a problem of any operation and calls `visit(problem)`.
/// Errors    InvalidArgument from parsing, or listing the operations.
template <class Visit>
auto visit_problem(std::string_view words, Visit&& visit) {
  return visit_problem_of(Operations{}, words, visit);
}

/// E of a problem.
template <class Problem>
int experts_of(const Problem& problem) {
  if constexpr (std::is_same_v<Problem, DequantizeProblem>)
    return problem.source.experts;
  else
    return problem.experts;
}

}  // namespace cadre::bench
