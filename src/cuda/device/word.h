#pragma once
#include <cuda_runtime.h>

#include <cstdint>

// Reads and writes of device memory, and numbers of a thread, that the compiler takes as they are.
// One wrapper, one instruction.
namespace cadre::cuda {

/// Brings the line of 128 bytes that an address is in nearer, to where all SMs find it.
__device__ inline void prefetch_line(const char* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)));
}

/// Writes a word if number < below, with no branch: one would take along what the word is made of.
__device__ inline void store_word_below(int number, int below, uint8_t* to, uint32_t word) {
  asm volatile("{ .reg .pred p; setp.lt.s32 p, %2, %3; @p st.global.u32 [%0], %1; }" ::"l"(
                   __cvta_generic_to_global(to)),
               "r"(word), "r"(number), "r"(below)
               : "memory");
}

/// Likewise two words, or four, to where they are aligned.
__device__ inline void store_words_below(int number, int below, uint8_t* to, uint2 words) {
  asm volatile("{ .reg .pred p; setp.lt.s32 p, %3, %4; @p st.global.v2.u32 [%0], {%1, %2}; }" ::"l"(
                   __cvta_generic_to_global(to)),
               "r"(words.x), "r"(words.y), "r"(number), "r"(below)
               : "memory");
}
__device__ inline void store_words_below(int number, int below, uint8_t* to, uint4 words) {
  asm volatile(
      "{ .reg .pred p; setp.lt.s32 p, %5, %6; @p st.global.v4.u32 [%0], {%1, %2, %3, %4}; }" ::"l"(
          __cvta_generic_to_global(to)),
      "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "r"(number), "r"(below)
      : "memory");
}

/// threadIdx.x, read again wherever it is asked for: a register that keeps it would be spilled.
__device__ inline int thread_x() {
  int x = 0;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

/// The same words, of which the compiler does not know that: what is made of them behind a branch
/// it does not make before it, which takes registers.
__device__ inline uint4 words_anew(uint4 words) {
  asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
  return words;
}

/// Makes an address one number in registers, to which a multiple is added by one instruction.
template <class Byte>
__device__ inline Byte* as_one_number(Byte* address) {
  asm volatile("" : "+l"(address));
  return address;
}

}  // namespace cadre::cuda
