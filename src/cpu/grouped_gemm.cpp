#include "cpu/grouped_gemm.h"

#include "cpu/gemm/in_place.h"
#include "cpu/gemm/panels.h"
#include "cpu/gemm/ragged_contraction.h"
#include "cpu/gemm/ragged_rows.h"
#include "cpu/gemm/refusals.h"
#include "cpu/gemm/tile_product.h"

namespace cadre::cpu {
namespace {

using gemm::means_of;
using gemm::Multiplicand;

std::string refuses_tiles(const GroupedGemmProblem& p, Multiplicand type) {
  if (const std::string why = gemm::refuses_order(p); !why.empty()) return why;
  if (p.pass == Pass::kWgrad) return "takes fprop and dgrad";
  if (gemm::is_for_in_place(p, {type}))
    return "cpu_onednn multiplies these operands where they lie";
  const char* why = gemm::refuses_tile_product(type, gemm::processor());
  return why == nullptr ? "" : why;
}

void run_tiles(const GroupedGemmPlan& plan, const GroupedGemmArgs& args, Workspace workspace,
               Multiplicand type) {
  gemm::panels(plan.problem, args, means_of(plan.problem, plan.device, type), workspace);
}

}  // namespace

std::string refuses_grouped_gemm_tiles_bf16(const GroupedGemmProblem& p, const Device&) {
  const std::string why = gemm::refuses_bf16(p);
  return why.empty() ? refuses_tiles(p, Multiplicand::kBf16) : why;
}

std::string refuses_grouped_gemm_tiles(const GroupedGemmProblem& p, const Device&) {
  return refuses_tiles(p, Multiplicand::kF32);
}

void grouped_gemm_tiles_bf16(const GroupedGemmPlan& plan, const GroupedGemmArgs& args,
                             Workspace workspace, Stream) {
  run_tiles(plan, args, workspace, Multiplicand::kBf16);
}

void grouped_gemm_tiles(const GroupedGemmPlan& plan, const GroupedGemmArgs& args,
                        Workspace workspace, Stream) {
  run_tiles(plan, args, workspace, Multiplicand::kF32);
}

int64_t grouped_gemm_tiles_bf16_workspace_bytes(const GroupedGemmProblem& p, const Device& device) {
  return gemm::panels_bytes(p, means_of(p, device, Multiplicand::kBf16));
}

int64_t grouped_gemm_tiles_workspace_bytes(const GroupedGemmProblem& p, const Device& device) {
  return gemm::panels_bytes(p, means_of(p, device, Multiplicand::kF32));
}

std::string refuses_grouped_gemm_portable(const GroupedGemmProblem& p, const Device&) {
  return gemm::refuses_order(p);
}

void grouped_gemm_portable(const GroupedGemmPlan& plan, const GroupedGemmArgs& args,
                           Workspace workspace, Stream) {
  const GroupedGemmProblem& p = plan.problem;
  const gemm::Means means = means_of(p, plan.device, Multiplicand::kF32);
  p.pass == Pass::kWgrad ? gemm::ragged_contraction(p, args, means, workspace)
                         : gemm::ragged_rows(p, args, means, workspace);
}

int64_t grouped_gemm_portable_workspace_bytes(const GroupedGemmProblem& p, const Device& device) {
  const gemm::Means means = means_of(p, device, Multiplicand::kF32);
  return p.pass == Pass::kWgrad ? gemm::ragged_contraction_bytes(p, means)
                                : gemm::ragged_rows_bytes(p, means);
}

}  // namespace cadre::cpu
