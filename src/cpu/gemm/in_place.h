#pragma once
#include "cadre/grouped_gemm.h"
#include "cpu/gemm/means.h"

// Grouped GEMM on operands where they lie, without staging: plain row-major operands, of which the
// second is read across the contraction. One task a tile of the output; threads take the next.
namespace cadre::cpu::gemm {

/// Whether this problem is for in_place.
bool is_for_in_place(const GroupedGemmProblem&, const Means&);

void in_place(const GroupedGemmProblem&, const GroupedGemmArgs&, const Means&, Workspace);
int64_t in_place_bytes(const GroupedGemmProblem&, const Means&);

}  // namespace cadre::cpu::gemm
