#pragma once
#include "cadre/grouped_gemm.h"
#include "cpu/gemm/means.h"

namespace cadre::cpu::gemm {

/// wgrad. The rows of an expert are cut into chunks of up to 256, the expert's dw into tiles. In
/// waves: first the chunks of the wave are staged, dy transposed, then every tile of every expert
/// of the wave is a task, which adds its chunks up in order. An expert that goes on in the next
/// wave leaves its sums in fp32.
void ragged_contraction(const GroupedGemmProblem&, const GroupedGemmArgs&, const Means&, Workspace);
int64_t ragged_contraction_bytes(const GroupedGemmProblem&, const Means&);

}  // namespace cadre::cpu::gemm
