#pragma once
#include <string>

#include "cadre/grouped_gemm.h"
#include "cadre/stream.h"
#include "cadre/workspace.h"

namespace cadre::cuda::portable {

/// Grouped products of f32, bf16 and f16 with the tensor cores of sm_80, or in fp32: fprop and
/// dgrad, and wgrad.
std::string refuses_ragged_rows(const GroupedGemmProblem&, const Device&);
std::string refuses_ragged_contraction(const GroupedGemmProblem&, const Device&);

void run_ragged_rows(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);
void run_ragged_contraction(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);

}  // namespace cadre::cuda::portable
