#pragma once
#include <cooperative_groups.h>

namespace cadre::cuda {

/// Waits until every block of the grid is here, and shows each what the others wrote before. All
/// threads of a grid that was launched as cooperative must call it; who is waited for is counted in
/// memory of the driver's.
__device__ inline void grid_barrier() { cooperative_groups::this_grid().sync(); }

}  // namespace cadre::cuda
