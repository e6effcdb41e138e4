#pragma once
#include "cadre/grouped_gemm.h"

namespace cadre::cpu::reference {

/// Every operand element decoded to double, sums in double, one rounding at the store.
void grouped_gemm(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);

}  // namespace cadre::cpu::reference
