#include "cpu/grouped_gemm.h"

#include <algorithm>

#include "cadre/error.h"
#include "cpu/gemm/in_place.h"
#include "cpu/gemm/panels.h"
#include "cpu/gemm/ragged_contraction.h"
#include "cpu/gemm/ragged_rows.h"
#include "cpu/gemm/tile_product.h"

namespace cadre::cpu {
namespace {

using gemm::Multiplicand;

/// Products below which another thread costs more than it brings.
constexpr int64_t kProductsOfThread = 1 << 20;

/// As what the operands are multiplied, by how many threads.
gemm::Means means_of(const GroupedGemmProblem& p, const Device& device, Multiplicand type) {
  const int units = std::max(device.units, 1);
  const int allowed = p.unit_budget > 0 ? std::min(p.unit_budget, units) : units;
  const double useful = 1 + double(p.rows) * double(p.n) * double(p.k) / kProductsOfThread;
  const int threads = int(std::min<double>(allowed, useful));
  return {type, threads, threads * gemm::Means::kWaveOfThread};
}

int64_t workspace_bytes(const GroupedGemmProblem& p, const gemm::Means& means) {
  if (gemm::is_for_in_place(p, means)) return gemm::in_place_bytes(p, means);
  return p.pass == Pass::kWgrad ? gemm::ragged_contraction_bytes(p, means)
                                : gemm::ragged_rows_bytes(p, means);
}

void run(const GroupedGemmProblem& p, const GroupedGemmArgs& args, const gemm::Means& means,
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

/// True if a code times its block scale is a bf16 number, whatever both are. mxfp8 and mxfp4 are
/// not among them: their scales reach beyond bf16's smallest numbers.
bool is_bf16(FormatKind kind) {
  return kind == FormatKind::kBf16 || kind == FormatKind::kFp8Tensor || kind == FormatKind::kNvfp4;
}

/// Lines of codes are read with the scales of their rows.
std::string refuses_order(const GroupedGemmProblem& p) {
  const bool codes = !is_plain(p.rhs) && p.rhs_major == Major::kColumn;
  const bool scales = p.lhs_scales_major == Major::kColumn || p.rhs_scales_major == Major::kColumn;
  return codes || scales ? "takes row-major codes and scales" : "";
}

std::string refuses_tiles(const GroupedGemmProblem& p, Multiplicand type) {
  if (const std::string why = refuses_order(p); !why.empty()) return why;
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

std::string refuses_grouped_gemm_tiles_bf16(const GroupedGemmProblem& p, const Device& device) {
  const std::string why = refuses_grouped_gemm_bf16(p, device);
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

std::string refuses_grouped_gemm_bf16(const GroupedGemmProblem& p, const Device&) {
  for (const Format& format : {p.lhs, p.rhs})
    if (!is_bf16(format.kind))
      return text("takes operands whose decoded codes are bf16 numbers, not ", to_string(format));
  if (!gemm::processor().bf16)
    return "oneDNN's bf16 products are missing, unsafe or slower than fp32 on this processor";
  return refuses_order(p);
}

std::string refuses_grouped_gemm_f32(const GroupedGemmProblem& p, const Device&) {
  return refuses_order(p);
}

void grouped_gemm_bf16(const GroupedGemmPlan& plan, const GroupedGemmArgs& args,
                       Workspace workspace, Stream) {
  run(plan.problem, args, means_of(plan.problem, plan.device, Multiplicand::kBf16), workspace);
}

void grouped_gemm_f32(const GroupedGemmPlan& plan, const GroupedGemmArgs& args, Workspace workspace,
                      Stream) {
  run(plan.problem, args, means_of(plan.problem, plan.device, Multiplicand::kF32), workspace);
}

int64_t grouped_gemm_bf16_workspace_bytes(const GroupedGemmProblem& p, const Device& device) {
  return workspace_bytes(p, means_of(p, device, Multiplicand::kBf16));
}

int64_t grouped_gemm_f32_workspace_bytes(const GroupedGemmProblem& p, const Device& device) {
  return workspace_bytes(p, means_of(p, device, Multiplicand::kF32));
}

}  // namespace cadre::cpu
