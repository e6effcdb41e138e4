#include "cpu/grouped_gemm.h"

#include <dnnl.hpp>

#include "cadre/error.h"
#include "cpu/gemm/in_place.h"
#include "cpu/gemm/ragged_contraction.h"
#include "cpu/gemm/ragged_rows.h"
#include "cpu/gemm/refusals.h"

namespace cadre::cpu {
namespace {

using gemm::Means;
using gemm::Multiplicand;

Means onednn_means(const GroupedGemmProblem& p, const Device& device, Multiplicand type) {
  Means means = gemm::means_of(p, device, type);
  means.products = gemm::onednn_products;
  return means;
}

int64_t workspace_bytes(const GroupedGemmProblem& p, const Means& means) {
  if (gemm::is_for_in_place(p, means)) return gemm::in_place_bytes(p, means);
  return p.pass == Pass::kWgrad ? gemm::ragged_contraction_bytes(p, means)
                                : gemm::ragged_rows_bytes(p, means);
}

void run(const GroupedGemmProblem& p, const GroupedGemmArgs& args, const Means& means,
         Workspace workspace) {
  try {
    if (gemm::is_for_in_place(p, means)) return gemm::in_place(p, args, means, workspace);
    p.pass == Pass::kWgrad ? gemm::ragged_contraction(p, args, means, workspace)
                           : gemm::ragged_rows(p, args, means, workspace);
  } catch (const dnnl::error& error) {
    throw DeviceError(text("grouped_gemm: oneDNN says '", error.what(), "', status ", error.status,
                           " [", to_string(p), "]"));
  }
}

}  // namespace

std::string refuses_grouped_gemm_bf16(const GroupedGemmProblem& p, const Device&) {
  return gemm::refuses_bf16(p);
}

std::string refuses_grouped_gemm_f32(const GroupedGemmProblem& p, const Device&) {
  return gemm::refuses_order(p);
}

void grouped_gemm_bf16(const GroupedGemmPlan& plan, const GroupedGemmArgs& args,
                       Workspace workspace, Stream) {
  run(plan.problem, args, onednn_means(plan.problem, plan.device, Multiplicand::kBf16), workspace);
}

void grouped_gemm_f32(const GroupedGemmPlan& plan, const GroupedGemmArgs& args, Workspace workspace,
                      Stream) {
  run(plan.problem, args, onednn_means(plan.problem, plan.device, Multiplicand::kF32), workspace);
}

int64_t grouped_gemm_bf16_workspace_bytes(const GroupedGemmProblem& p, const Device& device) {
  return workspace_bytes(p, onednn_means(p, device, Multiplicand::kBf16));
}

int64_t grouped_gemm_f32_workspace_bytes(const GroupedGemmProblem& p, const Device& device) {
  return workspace_bytes(p, onednn_means(p, device, Multiplicand::kF32));
}

}  // namespace cadre::cpu
