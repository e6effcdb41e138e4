#pragma once
#include <cuda.h>

#include <cstdint>

#include "cuda/device/barrier.h"

// Copies of boxes between device memory and shared memory by the copy engine (TMA). One thread
// starts a copy; coordinates count elements, innermost first. One wrapper, one instruction.
namespace cadre::cuda {

/// Changes the address of a map in device memory.
__device__ inline void set_address(CUtensorMap& map, const void* address) {
  asm volatile("tensormap.replace.tile.global_address.global.b1024.b64 [%0], %1;" ::"l"(
                   __cvta_generic_to_global(&map)),
               "l"(address)
               : "memory");
}

/// Makes a map that ordinary writes changed ready for acquire() in another kernel.
__device__ inline void publish(const CUtensorMap&) {
  asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory");
}

/// Makes a map visible that an earlier kernel wrote to device memory.
__device__ inline void acquire(const CUtensorMap& map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(&map) : "memory");
}

struct Box3 {
  int x, y, z;
};
struct Box4 {
  int x, y, z, w;
};

/// Loads a box; its bytes are counted by the barrier.
__device__ inline void load(void* to, const CUtensorMap& map, const Box3& at, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to)),
      "l"(&map), "r"(at.x), "r"(at.y), "r"(at.z), "r"(shared_address(&barrier))
      : "memory");
}
__device__ inline void load(void* to, const CUtensorMap& map, const Box4& at, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(to)),
      "l"(&map), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "r"(shared_address(&barrier))
      : "memory");
}

/// The same, to the same place of every block in `blocks`, one bit each.
__device__ inline void load(void* to, const CUtensorMap& map, const Box4& at, Barrier& barrier,
                            uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(to)),
      "l"(&map), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "r"(shared_address(&barrier)),
      "h"(blocks)
      : "memory");
}

/// Stores a box as part of this thread's open group.
__device__ inline void store(const CUtensorMap& map, const Box3& at, const void* from) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
      "r"(at.x), "r"(at.y), "r"(at.z), "r"(shared_address(from))
      : "memory");
}
__device__ inline void store(const CUtensorMap& map, const Box4& at, const void* from) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(
          &map),
      "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "r"(shared_address(from))
      : "memory");
}

/// Adds a box to what device memory holds.
__device__ inline void add(const CUtensorMap& map, const Box3& at, const void* from) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group"
      " [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
      "r"(at.x), "r"(at.y), "r"(at.z), "r"(shared_address(from))
      : "memory");
}

__device__ inline void close_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// Waits until all but the youngest `kLeft` groups have read their shared memory.
template <int kLeft>
__device__ inline void wait_for_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}

/// Waits until all stores of this thread are in memory.
__device__ inline void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/// Makes ordinary writes to shared memory visible to the copy engine and the tensor cores.
__device__ inline void fence_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace cadre::cuda
