#pragma once
#include "cadre/grouped_gemm.h"
#include "cpu/gemm/means.h"

namespace cadre::cpu::gemm {

/// fprop and dgrad with tile_product(). A task is a block of rows of one expert and a span of the
/// output's columns. The weight is read in panels of 64 columns: one is staged from L2, and while
/// it is multiplied with all rows of the block the next is prefetched. Rows are read where they lie
/// if they are plain, else they are staged.
void panels(const GroupedGemmProblem&, const GroupedGemmArgs&, const Means&, Workspace);
int64_t panels_bytes(const GroupedGemmProblem&, const Means&);

}  // namespace cadre::cpu::gemm
