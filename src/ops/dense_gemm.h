#pragma once
#include "cadre/grouped_gemm.h"
#include "ops/checks.h"

// A grouped GEMM whose one expert has all rows.
namespace cadre::ops {

/// What must hold of it.
/// Errors    InvalidArgument.
void check_dense(const GroupedGemmProblem&, const Checks<GroupedGemmProblem>&);

/// Offsets are there unless it is dense.
void check_offsets(const GroupedGemmProblem&, const Offsets&, const Checks<GroupedGemmProblem>&);

/// Launches any; a dense one with offsets on the CPU, whose kernels read some.
void launch_gemm(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);

}  // namespace cadre::ops
