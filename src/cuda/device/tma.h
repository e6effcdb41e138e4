#pragma once
#include <cuda.h>

#include <cstdint>

#include "cuda/device/barrier.h"

// TMA: copies of boxes, and of plain bytes, between global memory and shared memory. One thread
// issues a copy; coordinates count elements, innermost first. One wrapper, one instruction.
namespace cadre::cuda {

/// Changes the address of a tensor map in global memory.
__device__ inline void replace_address(CUtensorMap& map, const void* address) {
  asm volatile("tensormap.replace.tile.global_address.global.b1024.b64 [%0], %1;" ::"l"(
                   __cvta_generic_to_global(&map)),
               "l"(address)
               : "memory");
}

/// Releases a tensor map that ordinary writes changed to the acquire of another kernel.
__device__ inline void tensormap_release(const CUtensorMap&) {
  asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory");
}

/// Acquires a tensor map that an earlier kernel wrote.
__device__ inline void tensormap_acquire(const CUtensorMap& map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(&map) : "memory");
}

struct Box3 {
  int x, y, z;
};
struct Box4 {
  int x, y, z, w;
};
struct Box5 {
  int x, y, z, w, v;
};

/// Loads a box; its bytes are counted by the barrier.
__device__ inline void tma_load(void* to, const CUtensorMap& map, const Box3& at,
                                Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to)),
      "l"(&map), "r"(at.x), "r"(at.y), "r"(at.z), "r"(shared_address(&barrier))
      : "memory");
}
__device__ inline void tma_load(void* to, const CUtensorMap& map, const Box4& at,
                                Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(to)),
      "l"(&map), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "r"(shared_address(&barrier))
      : "memory");
}
__device__ inline void tma_load(void* to, const CUtensorMap& map, const Box5& at,
                                Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(shared_address(to)),
      "l"(&map), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "r"(at.v),
      "r"(shared_address(&barrier))
      : "memory");
}

/// The same, to the same place of every block in `blocks`, one bit each.
__device__ inline void tma_load(void* to, const CUtensorMap& map, const Box3& at, Barrier& barrier,
                                uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
      "l"(&map), "r"(at.x), "r"(at.y), "r"(at.z), "r"(shared_address(&barrier)), "h"(blocks)
      : "memory");
}
__device__ inline void tma_load(void* to, const CUtensorMap& map, const Box4& at, Barrier& barrier,
                                uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(to)),
      "l"(&map), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "r"(shared_address(&barrier)),
      "h"(blocks)
      : "memory");
}

__device__ inline void tma_load(void* to, const CUtensorMap& map, const Box5& at, Barrier& barrier,
                                uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(shared_address(to)),
      "l"(&map), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "r"(at.v),
      "r"(shared_address(&barrier)), "h"(blocks)
      : "memory");
}

/// Copies so many bytes as they lie. Both addresses and the bytes are multiples of 16.
__device__ inline void bulk_load(void* to, const void* from, uint32_t bytes, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}

/// The other way, as part of this thread's uncommitted bulk group.
__device__ inline void bulk_store(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(to)),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}

/// Stores a box, as part of this thread's uncommitted bulk group.
__device__ inline void tma_store(const CUtensorMap& map, const Box3& at, const void* from) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
      "r"(at.x), "r"(at.y), "r"(at.z), "r"(shared_address(from))
      : "memory");
}
__device__ inline void tma_store(const CUtensorMap& map, const Box4& at, const void* from) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(
          &map),
      "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "r"(shared_address(from))
      : "memory");
}

/// Adds a box to what global memory holds (reduce-add).
__device__ inline void tma_reduce_add(const CUtensorMap& map, const Box3& at, const void* from) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group"
      " [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
      "r"(at.x), "r"(at.y), "r"(at.z), "r"(shared_address(from))
      : "memory");
}

__device__ inline void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// Waits until all but the youngest `kLeft` bulk groups have read their shared memory.
template <int kLeft>
__device__ inline void tma_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}

/// Waits until all bulk groups of this thread are complete.
__device__ inline void tma_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/// The proxy fence between ordinary writes to shared memory and reads by TMA and wgmma.
__device__ inline void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace cadre::cuda
