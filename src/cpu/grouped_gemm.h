#pragma once
#include <string>

#include "cadre/grouped_gemm.h"

namespace cadre::cpu {

/// Grouped GEMM by oneDNN, tile by tile: operands are decoded to bf16, or to fp32, and every
/// product is a single-threaded call of fixed order; the tiles are shared among threads.
///
/// Exact     The order of a sum is that of its contraction. It depends neither on the threads nor,
///           for y and dx, on other rows.
void grouped_gemm_bf16(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);
void grouped_gemm_f32(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);
int64_t grouped_gemm_bf16_workspace_bytes(const GroupedGemmProblem&, const Device&);
int64_t grouped_gemm_f32_workspace_bytes(const GroupedGemmProblem&, const Device&);

/// bf16 products need a processor that is good at them, and operands that are bf16 numbers but for
/// a scale per expert. Both want codes and scales row-major.
std::string refuses_grouped_gemm_bf16(const GroupedGemmProblem&, const Device&);
std::string refuses_grouped_gemm_f32(const GroupedGemmProblem&, const Device&);

/// fprop and dgrad by a product of our own, for AVX-512 and few rows an expert: it prefetches the
/// next weights while it multiplies.
///
/// Exact     As above.
void grouped_gemm_tiles_bf16(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);
void grouped_gemm_tiles(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);
int64_t grouped_gemm_tiles_bf16_workspace_bytes(const GroupedGemmProblem&, const Device&);
int64_t grouped_gemm_tiles_workspace_bytes(const GroupedGemmProblem&, const Device&);
std::string refuses_grouped_gemm_tiles_bf16(const GroupedGemmProblem&, const Device&);
std::string refuses_grouped_gemm_tiles(const GroupedGemmProblem&, const Device&);

/// As by oneDNN in fp32, with products in plain C++: for what it does not take, and
/// builds without it.
///
/// Exact     As above.
void grouped_gemm_portable(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);
int64_t grouped_gemm_portable_workspace_bytes(const GroupedGemmProblem&, const Device&);
std::string refuses_grouped_gemm_portable(const GroupedGemmProblem&, const Device&);

}  // namespace cadre::cpu
