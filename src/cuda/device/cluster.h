#pragma once
#include "cuda/device/barrier.h"

// Shared memory of the other blocks of a cluster. One wrapper, one instruction.
namespace cadre::cuda {

/// Reads the same address in another block.
__device__ inline float ld_cluster(const float& from, uint32_t block) {
  float value;
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %1, %2;"
      "  ld.shared::cluster.f32 %0, [remote]; }"
      : "=f"(value)
      : "r"(shared_address(&from)), "r"(block)
      : "memory");
  return value;
}

}  // namespace cadre::cuda
