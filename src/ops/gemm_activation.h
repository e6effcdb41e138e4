#pragma once
#include "cadre/grouped_gemm.h"
#include "ops/checks.h"
#include "ops/problem_text.h"

// The activation of a grouped GEMM: its words, and what must hold of it.
namespace cadre::ops {

/// act=, and what follows it, where there is one.
void activation_fields(ProblemWriter&, const std::optional<GemmActivation>&);
void activation_fields(ProblemReader&, std::optional<GemmActivation>&);
void activation_fields(WordsLook&, const std::optional<GemmActivation>&);

/// Errors    InvalidArgument.
void check_activation(const GroupedGemmProblem&, const Checks<GroupedGemmProblem>&);

}  // namespace cadre::ops
