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
/// The two numbers of such a word.
struct Pair {
  float first, second;
};
__device__ inline Pair unpack_bf16(uint32_t both) {
  return {__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u)};
}
__device__ inline Pair unpack_f16(uint32_t both) {
  Pair pair;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
      : "=f"(pair.first), "=f"(pair.second)
      : "r"(both));
  return pair;
}

/// The products of two pairs of bf16 numbers, each rounded once to nearest even.
__device__ inline uint32_t mul_bf16(uint32_t a, uint32_t b) {
  uint32_t both;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
  return both;
}

/// The low half twice, or the high one: products read halves without an instruction for it.
template <int kHalf>
__device__ inline uint32_t twice(uint32_t both) {
  uint32_t pair;
  if constexpr (kHalf == 0)
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }"
        : "=r"(pair)
        : "r"(both));
  else
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }"
        : "=r"(pair)
        : "r"(both));
  return pair;
}

/// a - b by the units that multiply, where those of sums and masks are busy.
__device__ inline uint32_t subtract(uint32_t a, uint32_t b) {
  uint32_t difference;
  asm("mad.lo.u32 %0, %1, 0xffffffff, %2;" : "=r"(difference) : "r"(b), "r"(a));
  return difference;
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

/// The same of two of them, whose rows threads 0 to 15 name.
__device__ inline void stmatrix(uint32_t to, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b)
               : "memory");
}

/// Writes them column by column.
__device__ inline void stmatrix_trans(uint32_t to, const Matrices& m) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(m.a), "r"(m.b), "r"(m.c), "r"(m.d)
               : "memory");
}

/// The same of one matrix, whose places threads 0 to 7 name, and of two.
__device__ inline void stmatrix_trans(uint32_t to, uint32_t a) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(to), "r"(a)
               : "memory");
}
__device__ inline void stmatrix_trans(uint32_t to, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(a),
               "r"(b)
               : "memory");
}

/// Reads four 8 x 8 matrices row by row, sixteen bytes each: thread t names the place of row t % 8
/// of matrix t / 8.
__device__ inline Matrices ldmatrix(uint32_t from) {
  Matrices m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m.a), "=r"(m.b), "=r"(m.c), "=r"(m.d)
               : "r"(from)
               : "memory");
  return m;
}

/// Reads them column by column.
__device__ inline Matrices ldmatrix_trans(uint32_t from) {
  Matrices m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m.a), "=r"(m.b), "=r"(m.c), "=r"(m.d)
               : "r"(from)
               : "memory");
  return m;
}

__device__ inline void st_shared_pair(uint32_t to, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(first), "f"(second) : "memory");
}
__device__ inline Pair ld_shared_pair(uint32_t from) {
  Pair pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(pair.first), "=f"(pair.second)
               : "r"(from)
               : "memory");
  return pair;
}
__device__ inline void st_shared(uint32_t to, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}
__device__ inline void st_shared(uint32_t to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}
__device__ inline float ld_shared_float(uint32_t from) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
  return value;
}

}  // namespace cadre::cuda
