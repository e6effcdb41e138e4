#pragma once
#include "cadre/permute.h"

namespace cadre::cpu::reference {

/// All four passes element by element in double.
void permute(const PermutePlan&, const PermuteArgs&, Workspace, Stream);

}  // namespace cadre::cpu::reference
