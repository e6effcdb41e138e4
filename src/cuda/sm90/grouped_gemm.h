#pragma once
#include <string>

#include "cadre/grouped_gemm.h"

// Grouped GEMM on Hopper: fprop and dgrad by ragged_rows.cuh, fprop with a gated activation by
// gated_rows.cuh, both from tokens by gathered_products.cuh and gathered_rows.cuh, fprop and dgrad
// to places by scattered_rows.cuh, those of 8-bit codes by fp8_rows.cuh, fprop of
// packed weights by packed_rows.cuh, of one expert that has all rows by dense_rows.cu, wgrad by
// ragged_contraction.cuh and, from tokens, by gathered_contraction.cuh.
namespace cadre::cuda::sm90 {

std::string refuses_ragged_rows(const GroupedGemmProblem&, const Device&);
std::string refuses_ragged_contraction(const GroupedGemmProblem&, const Device&);
std::string refuses_gated_rows(const GroupedGemmProblem&, const Device&);
std::string refuses_gathered_rows(const GroupedGemmProblem&, const Device&);
std::string refuses_gathered_contraction(const GroupedGemmProblem&, const Device&);
std::string refuses_scattered_rows(const GroupedGemmProblem&, const Device&);
std::string refuses_fp8_rows(const GroupedGemmProblem&, const Device&);
std::string refuses_packed_rows(const GroupedGemmProblem&, const Device&);
std::string refuses_dense_rows(const GroupedGemmProblem&, const Device&);

/// One tensor map an expert, where experts are discrete or rows of w in blocks; the counter of
/// tiles, where clusters take tiles as they go; the places of rows, where wgrad gathers.
int64_t grouped_gemm_workspace_bytes(const GroupedGemmProblem&, const Device&);

/// The same, and a copy of x where its columns are split.
int64_t packed_rows_workspace_bytes(const GroupedGemmProblem&, const Device&);

// Addresses and strides that TMA takes.
void check_ragged_rows(const GroupedGemmProblem&, const GroupedGemmArgs&);
void check_ragged_contraction(const GroupedGemmProblem&, const GroupedGemmArgs&);
void check_gated_rows(const GroupedGemmProblem&, const GroupedGemmArgs&);
void check_gathered_rows(const GroupedGemmProblem&, const GroupedGemmArgs&);
void check_gathered_contraction(const GroupedGemmProblem&, const GroupedGemmArgs&);
void check_scattered_rows(const GroupedGemmProblem&, const GroupedGemmArgs&);
void check_fp8_rows(const GroupedGemmProblem&, const GroupedGemmArgs&);
void check_packed_rows(const GroupedGemmProblem&, const GroupedGemmArgs&);
void check_dense_rows(const GroupedGemmProblem&, const GroupedGemmArgs&);

void run_ragged_rows(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);
void run_ragged_contraction(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);
void run_gated_rows(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);
void run_gathered_rows(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);
void run_gathered_contraction(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);
void run_scattered_rows(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);
void run_fp8_rows(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);
void run_packed_rows(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);
void run_dense_rows(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);

}  // namespace cadre::cuda::sm90
