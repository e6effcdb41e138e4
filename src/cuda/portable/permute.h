#pragma once
#include "cadre/permute.h"

namespace cadre::cuda::portable {

/// All four passes, each in one launch, with the bits of the CPU's `cpu`.
void permute(const PermutePlan&, const PermuteArgs&, Workspace, Stream);

}  // namespace cadre::cuda::portable
