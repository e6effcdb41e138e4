// The same symbols where the library is built without oneDNN (CADRE_ONEDNN=OFF).
#include "cpu/grouped_gemm.h"

#include "cadre/error.h"
#include "cpu/gemm/in_place.h"

namespace cadre::cpu {
namespace {

constexpr const char* kNone = "this build has no oneDNN";

}  // namespace

std::string refuses_grouped_gemm_bf16(const GroupedGemmProblem&, const Device&) { return kNone; }
std::string refuses_grouped_gemm_f32(const GroupedGemmProblem&, const Device&) { return kNone; }

void grouped_gemm_bf16(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream) {
  throw Unsupported(kNone);
}
void grouped_gemm_f32(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream) {
  throw Unsupported(kNone);
}
int64_t grouped_gemm_bf16_workspace_bytes(const GroupedGemmProblem&, const Device&) { return 0; }
int64_t grouped_gemm_f32_workspace_bytes(const GroupedGemmProblem&, const Device&) { return 0; }

gemm::ThreadProducts gemm::onednn_products(Multiplicand) { throw Unsupported(kNone); }
bool gemm::is_for_in_place(const GroupedGemmProblem&, const Means&) { return false; }

}  // namespace cadre::cpu
