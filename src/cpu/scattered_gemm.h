#pragma once
#include <string>

#include "backend/entry.h"
#include "cadre/grouped_gemm.h"

namespace cadre::cpu {

/// Products whose rows are scattered: the product, its rows in the workspace, and a copy of each to
/// its place.
std::string refuses_scattered_gemm(const GroupedGemmProblem&, const Device&);
int64_t scattered_gemm_workspace_bytes(const GroupedGemmProblem&, const Device&);
backend::Inner scattered_gemm_plans(const GroupedGemmProblem&, const Device&);
void scattered_gemm(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);

}  // namespace cadre::cpu
