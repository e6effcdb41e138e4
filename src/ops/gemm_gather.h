#pragma once
#include "cadre/grouped_gemm.h"
#include "ops/checks.h"

// The operand of a grouped GEMM that lies in token order, and the output that does.
namespace cadre::ops {

/// What must hold of each, and of the fields that nobody gives without it.
/// Errors    InvalidArgument.
void check_gather(const GroupedGemmProblem&, const Checks<GroupedGemmProblem>&);
void check_scatter(const GroupedGemmProblem&, const Checks<GroupedGemmProblem>&);

}  // namespace cadre::ops
