#pragma once
#include "cadre/permute.h"

namespace cadre::cpu {

/// All four passes: copies row by row, sums token by token, in parallel.
void permute(const PermutePlan&, const PermuteArgs&, Workspace, Stream);

}  // namespace cadre::cpu
