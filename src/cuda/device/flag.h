#pragma once
#include <cstdint>

// Words in memory that GPUs and the host share, by which they tell each other that data is there.
// Whoever acquires a released word sees what was written before it. One wrapper, one instruction.
namespace cadre::cuda {

__device__ inline uint32_t load_acquire_system(const uint32_t* word) {
  uint32_t value = 0;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(word))
               : "memory");
  return value;
}
__device__ inline uint64_t load_acquire_system(const uint64_t* word) {
  uint64_t value = 0;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
               : "=l"(value)
               : "l"(__cvta_generic_to_global(word))
               : "memory");
  return value;
}

__device__ inline void store_release_system(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(word)),
               "r"(value)
               : "memory");
}
__device__ inline void store_release_system(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(word)),
               "l"(value)
               : "memory");
}

/// Words that say all by themselves, or whose order a fence sees to.
__device__ inline uint32_t load_relaxed_system(const uint32_t* word) {
  uint32_t value = 0;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(word))
               : "memory");
  return value;
}
__device__ inline uint64_t load_relaxed_system(const uint64_t* word) {
  uint64_t value = 0;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];"
               : "=l"(value)
               : "l"(__cvta_generic_to_global(word))
               : "memory");
  return value;
}
__device__ inline void store_relaxed_system(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(word)),
               "l"(value)
               : "memory");
}

/// What this thread has seen written comes before whatever it stores behind this, for all GPUs or
/// for the threads of this one.
__device__ inline void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ inline void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

/// Adds, for who counts the threads of a GPU that have come somewhere; what was there before. Who
/// adds has released by a fence.
__device__ inline uint32_t add_acquire(uint32_t* word, uint32_t value) {
  uint32_t before = 0;
  asm volatile("atom.acquire.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(word)), "r"(value)
               : "memory");
  return before;
}

/// Nanoseconds since some moment.
__device__ inline uint64_t nanoseconds() {
  uint64_t now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

/// A short rest for who asks in a loop.
__device__ inline void rest() { asm volatile("nanosleep.u32 64;" ::: "memory"); }

}  // namespace cadre::cuda
