#pragma once
#include "cuda/device/barrier.h"

// The words of src/cuda/device/cluster.h in plain C++.
namespace cadre::cuda {

inline float ld_cluster(const float& from, uint32_t block) {
  return *static_cast<const float*>(emulator::in_block(&from, int(block)));
}

}  // namespace cadre::cuda
