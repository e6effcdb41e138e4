#pragma once
#include <cstdint>

// The copies of sm_80 and later: from device memory to shared memory, behind a thread's back, in
// groups that finish in order. One wrapper, one instruction; and an address to copy from.
namespace cadre::cuda {

/// Copies the first `bytes` of sixteen; the others become zero. Both places are aligned to sixteen.
__device__ inline void cp_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
}

/// The same where neighbouring threads copy the rest of a line of 128 bytes.
__device__ inline void cp_async_line(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
}

/// The same of all sixteen.
__device__ inline void cp_async_line(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}

/// Copies four bytes.
__device__ inline void cp_async_word(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}

/// Ends this thread's open group of copies.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits for this thread's groups but for the youngest `kLeft`.
template <int kLeft>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

}  // namespace cadre::cuda
