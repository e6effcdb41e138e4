#pragma once
#include "cadre/grouped_gemm.h"
#include "cpu/gemm/means.h"

namespace cadre::cpu::gemm {

/// fprop and dgrad, for whatever in_place does not take. A task is a block of rows of one expert
/// and a span of the output's columns: the rows are staged, then the weight comes by, panel after
/// panel.
///
/// If the weight lies along the contraction it is the first factor, read where it lies if it is
/// plain, and a tile of rows is the second: the sums come out transposed. Else rows come first, and
/// the weight is staged part by part.
void ragged_rows(const GroupedGemmProblem&, const GroupedGemmArgs&, const Means&, Workspace);
int64_t ragged_rows_bytes(const GroupedGemmProblem&, const Means&);

}  // namespace cadre::cpu::gemm
