#pragma once
#include "tests/emulator/machine.h"

// The word of src/cuda/device/grid.h: a cooperative grid is one cluster.
namespace cadre::cuda {

inline void grid_barrier() { emulator::meet_cluster(); }

}  // namespace cadre::cuda
