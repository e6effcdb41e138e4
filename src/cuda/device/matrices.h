#pragma once
#include <cstdint>

// Between sums in registers and elements in shared memory. One wrapper, one instruction.
namespace cadre::cuda {

/// Four 8 x 8 matrices of 16-bit elements, spread over a warp: thread t holds columns 2 (t % 4) and
/// the next of row t / 4 of each.
struct Matrices {
  uint32_t a, b, c, d;
};

/// Two numbers, each rounded once to nearest even, the first in the low half.
__device__ inline uint32_t pack_bf16(float first, float second) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
}
__device__ inline uint32_t pack_f16(float first, float second) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
}

/// a + b rounded, although a may be a product that the compiler would rather not round before.
__device__ inline float add_rounded(float a, float b) {
  float sum;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}

/// Writes them row by row, sixteen bytes each: thread t names the place of row t % 8 of matrix
/// t / 8.
__device__ inline void stmatrix(uint32_t to, const Matrices& m) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(m.a), "r"(m.b), "r"(m.c), "r"(m.d)
               : "memory");
}

/// Writes them column by column.
__device__ inline void stmatrix_trans(uint32_t to, const Matrices& m) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(m.a), "r"(m.b), "r"(m.c), "r"(m.d)
               : "memory");
}

__device__ inline void st_shared_pair(uint32_t to, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(first), "f"(second) : "memory");
}
struct Pair {
  float first, second;
};
__device__ inline Pair ld_shared_pair(uint32_t from) {
  Pair pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(pair.first), "=f"(pair.second)
               : "r"(from)
               : "memory");
  return pair;
}
__device__ inline void st_shared(uint32_t to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

}  // namespace cadre::cuda
