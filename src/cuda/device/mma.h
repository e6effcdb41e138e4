#pragma once
#include <cstdint>

#include "cuda/device/matrices.h"

// The tensor core products of sm_80: a warp multiplies 16 x 16 elements of one operand by 16 x 8 of
// the other. One wrapper, one instruction.
//
// Source    the matrix fragments of the PTX manual, sections ldmatrix and mma.
namespace cadre::cuda {

/// The second operand of a product: eight columns, sixteen deep.
struct Columns8 {
  uint32_t low, high;  ///< elements 0 to 7 of the contraction, and 8 to 15
};

/// sums[16, 8] += a[16, 16] * b[16, 8]. The matrices of `a` are its rows 0 to 7, 8 to 15, and the
/// same with elements 8 to 15 of the contraction. Thread t holds columns 2 (t % 4) and the next of
/// row t / 4 in sums[0] and sums[1], and of the row eight below in the others.
__device__ inline void multiply_bf16(float (&sums)[4], const Matrices& a, const Columns8& b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
      " {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a.a), "r"(a.b), "r"(a.c), "r"(a.d), "r"(b.low), "r"(b.high));
}
__device__ inline void multiply_f16(float (&sums)[4], const Matrices& a, const Columns8& b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
      " {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a.a), "r"(a.b), "r"(a.c), "r"(a.d), "r"(b.low), "r"(b.high));
}

}  // namespace cadre::cuda
