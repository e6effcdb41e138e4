#pragma once
#include <cstdint>

// mbarriers: they lie in shared memory and count arrivals, and bytes that TMA transfers. A phase
// completes when all of both have come; a wait names the parity of the phase that must be complete.
// One wrapper, one instruction.
namespace cadre::cuda {

using Barrier = uint64_t;

__device__ inline uint32_t shared_address(const void* memory) {
  return uint32_t(__cvta_generic_to_shared(memory));
}

__device__ inline void init(Barrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals));
}

/// Makes initialised barriers visible to TMA and to the other blocks of a cluster.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void arrive(Barrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}

/// Arrives at the same barrier of another block of the cluster. Orders nothing that this thread
/// wrote: with release at cluster scope every arrival would wait for all memory.
__device__ inline void arrive_cluster(Barrier& barrier, uint32_t block) {
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
      "  mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(shared_address(&barrier)),
      "r"(block)
      : "memory");
}

/// st.async: writes to the same address in another block of the cluster, whose barrier counts the
/// bytes.
__device__ inline void st_async(int64_t& to, int64_t value, Barrier& barrier, uint32_t block) {
  asm volatile(
      "{ .reg .b32 remote, counted; mapa.shared::cluster.u32 remote, %0, %3;"
      "  mapa.shared::cluster.u32 counted, %2, %3;"
      "  st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [remote], %1, [counted]; }" ::
          "r"(shared_address(&to)),
      "l"(value), "r"(shared_address(&barrier)), "r"(block)
      : "memory");
}

/// Arrives, and adds to the bytes that this phase expects.
__device__ inline void arrive_expect_tx(Barrier& barrier, uint32_t bytes) {
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

/// The same, asleep meanwhile: for who has time to wake up. It asks seldom, and leaves the
/// instruction slots and the power of its SM to the others.
__device__ inline void wait_asleep(Barrier& barrier, uint32_t parity) {
  constexpr uint32_t kMostNanoseconds = 1'000'000;  // of one sleep
  uint32_t over = 0;
  while (over == 0)
    asm volatile(
        "{ .reg .pred over; mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2, %3;"
        "  selp.u32 %0, 1, 0, over; }"
        : "=r"(over)
        : "r"(shared_address(&barrier)), "r"(parity), "r"(kMostNanoseconds)
        : "memory");
}

/// True in one lane of a warp, all of which have come here. The compiler then knows that one thread
/// goes on, and starts its copies without asking which.
__device__ inline bool elect() {
  uint32_t is_elected = 0;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }"
               : "=r"(is_elected)::"memory");
  return is_elected != 0;
}

/// This block's rank in its cluster.
__device__ inline uint32_t cluster_ctarank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// The cluster's own barrier: waits for all of its threads.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

}  // namespace cadre::cuda
