#pragma once
#include <memory>
#include <string>

#include "cadre/grouped_gemm.h"

namespace cadre::backend {

/// A grouped GEMM with an activation as two operations, one after the other, z in the workspace
/// unless it is kept: what fused kernels must equal bit for bit, and what there is where none of
/// them runs.
std::string refuses_composed_gemm(const GroupedGemmProblem&, const Device&);
int64_t composed_gemm_workspace_bytes(const GroupedGemmProblem&, const Device&);
std::shared_ptr<const void> composed_gemm_plans(const GroupedGemmProblem&, const Device&);
void composed_gemm(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);

/// `refuses` of an implementation without activations.
template <std::string (*refuses)(const GroupedGemmProblem&, const Device&)>
std::string plain_gemm(const GroupedGemmProblem& p, const Device& device) {
  return p.activation ? "computes no activation" : refuses(p, device);
}

}  // namespace cadre::backend
