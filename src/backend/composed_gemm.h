#pragma once
#include <string>

#include "backend/entry.h"
#include "cadre/grouped_gemm.h"

namespace cadre::backend {

/// A grouped GEMM as two operations, one after the other: what fused kernels must equal bit for
/// bit, and what there is where none of them runs. With gather they are permute, whose rows lie in
/// the workspace, and the product of these; with an activation alone the product, z in the
/// workspace unless it is kept, and the activation.
std::string refuses_composed_gemm(const GroupedGemmProblem&, const Device&);
int64_t composed_gemm_workspace_bytes(const GroupedGemmProblem&, const Device&);
Inner composed_gemm_plans(const GroupedGemmProblem&, const Device&);
void check_composed_gemm(const GroupedGemmPlan&, const GroupedGemmArgs&);
void composed_gemm(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);

/// `refuses` of an implementation of products alone.
template <std::string (*refuses)(const GroupedGemmProblem&, const Device&)>
std::string plain_gemm(const GroupedGemmProblem& p, const Device& device) {
  if (p.gather != Gather::kNo) return "gathers no rows";
  if (p.scatter) return "scatters no rows";
  return p.activation ? "computes no activation" : refuses(p, device);
}

}  // namespace cadre::backend
