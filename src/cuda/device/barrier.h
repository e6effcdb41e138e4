#pragma once
#include <cstdint>

// Memory barriers in shared memory (mbarrier): they count arrivals, and bytes that the copy engine
// delivers. A barrier's phase flips when all that it waits for has come; whoever waits names the
// parity of the phase that must be over. One wrapper, one instruction.
namespace cadre::cuda {

using Barrier = uint64_t;

__device__ inline uint32_t shared_address(const void* memory) {
  return uint32_t(__cvta_generic_to_shared(memory));
}

__device__ inline void init(Barrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals));
}

/// Makes initialised barriers known to the copy engine and to the other blocks of a cluster.
__device__ inline void fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void arrive(Barrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}

/// Arrives at the same barrier of another block of the cluster. Orders nothing that this thread
/// wrote: with release at cluster scope every arrival would wait for all memory.
__device__ inline void arrive_at(Barrier& barrier, uint32_t block) {
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
      "  mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(shared_address(&barrier)),
      "r"(block)
      : "memory");
}

/// Writes to the same place of another block of the cluster; its barrier there counts the bytes.
__device__ inline void give(int64_t& to, int64_t value, Barrier& barrier, uint32_t block) {
  asm volatile(
      "{ .reg .b32 remote, counted; mapa.shared::cluster.u32 remote, %0, %3;"
      "  mapa.shared::cluster.u32 counted, %2, %3;"
      "  st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [remote], %1, [counted]; }" ::
          "r"(shared_address(&to)),
      "l"(value), "r"(shared_address(&barrier)), "r"(block)
      : "memory");
}

/// Arrives, and says how many bytes will be delivered in this phase.
__device__ inline void arrive_expecting(Barrier& barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}

__device__ inline bool try_wait(Barrier& barrier, uint32_t parity) {
  uint32_t over = 0;
  asm volatile(
      "{ .reg .pred over; mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;"
      "  selp.u32 %0, 1, 0, over; }"
      : "=r"(over)
      : "r"(shared_address(&barrier)), "r"(parity)
      : "memory");
  return over != 0;
}

/// Waits until the phase of that parity is over.
__device__ inline void wait(Barrier& barrier, uint32_t parity) {
  while (!try_wait(barrier, parity)) {
  }
}

/// True in one lane of a warp, all of which have come here. The compiler then knows that one thread
/// goes on, and starts its copies without asking which.
__device__ inline bool elect() {
  uint32_t is_elected = 0;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }"
               : "=r"(is_elected)::"memory");
  return is_elected != 0;
}

/// This block's number in its cluster.
__device__ inline uint32_t block_in_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// A barrier among all threads of a cluster.
__device__ inline void sync_cluster() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

}  // namespace cadre::cuda
