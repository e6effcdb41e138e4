#pragma once
#include "cadre/grouped_gemm.h"
#include "cpu/gemm/means.h"

namespace cadre::cpu::gemm {

/// fprop and dgrad. Rows are cut into tiles of up to 64 of one expert, the output's columns into
/// panels. In waves: first all tiles of the wave are staged, then every panel of every few tiles of
/// an expert is a task.
///
/// If the weight lies along the contraction it is the first factor, read where it lies, and a tile
/// of rows is the second: the sums come out transposed. Else rows come first, and the weight is
/// second: where it lies if it is fp32 without gaps, or staged part by part.
void ragged_rows(const GroupedGemmProblem&, const GroupedGemmArgs&, const Means&, Workspace);
int64_t ragged_rows_bytes(const GroupedGemmProblem&, const Means&);

}  // namespace cadre::cpu::gemm
