#pragma once
#include <cstdint>

#include "cadre/dtype.h"
#include "cuda/device/barrier.h"

// wgmma: a warpgroup, four warps, multiplies 64 rows of A by columns of B, both in shared memory,
// and adds to accumulators in registers. Operands lie in swizzle atoms as TMA writes them, whose
// rows have 128 bytes. One wrapper, one instruction.
//
// Source    the matrix descriptors and fragments of the PTX manual, section wgmma.
namespace cadre::cuda {

constexpr int kAtomBytes = 128;  ///< of a row of a swizzle atom

/// The matrix descriptor of an operand. K-major: the atoms' rows run along the contraction;
/// MN-major: across it, and atoms that are neighbours across it are `panel_bytes` apart.
template <bool kKMajor>
__device__ inline uint64_t matrix_descriptor(const void* memory, int panel_bytes) {
  const uint64_t eight_rows = (8 * kAtomBytes) >> 4;
  const uint64_t panel = kKMajor ? 1 : uint64_t(panel_bytes) >> 4;
  const uint64_t swizzle_128 = uint64_t(1) << 62;
  const uint64_t first = (shared_address(memory) & 0x3ffff) >> 4;
  return swizzle_128 | eight_rows << 32 | panel << 16 | first;
}

/// What to add to a descriptor for the next instruction along the contraction, of which one takes
/// 32 bytes: sixteen rows of an MN-major operand of 16 bits.
template <bool kKMajor>
constexpr uint64_t kDescriptorStep = (kKMajor ? 32 : 16 * kAtomBytes) >> 4;

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits for all but the youngest `kLeft` committed groups.
template <int kLeft>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

/// Keeps the compiler from moving reads and writes of accumulators, or of an operand in registers,
/// over a fence or a wait.
template <int kCount>
__device__ inline void pin(float* accumulators) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(accumulators[i])::"memory");
}
template <int kCount>
__device__ inline void pin(uint32_t* operand) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(operand[i])::"memory");
}

template <int kIncrease>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kIncrease));
}
template <int kDecrease>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kDecrease));
}

/// d[64, kWidth] (+)= a[64, 16] * b[16, kWidth], for widths that are multiples of 16; a and b of
/// that type. Thread t of the warpgroup holds, for every eight columns j, columns 8 j + 2 (t % 4)
/// and the next of row 16 (t / 32) + t % 32 / 4 in d[4 j] and d[4 j + 1], and of the row eight
/// below in the next two.
template <int kWidth, DType kDType>
struct Wgmma;

/// The same of 8-bit codes, d[64, kWidth] (+)= a[64, 32] * b[32, kWidth]: a of that type, b of
/// e4m3, both K-major. Its sums keep about 13 bits of fraction below the largest of their addends.
template <int kWidth, DType kDType>
struct WgmmaOfCodes;

/// The same of bf16 with a in registers: d[64, kWidth] (+)= a[64, 16] * b[16, kWidth], b K-major.
/// Thread t of the warpgroup holds columns 2 (t % 4) and the next of row 16 (t / 32) + t % 32 / 4
/// in a[0], of the row eight below in a[1], and the columns eight on of both in the next two. They
/// must not change until the product has been waited for.
template <int kWidth>
struct WgmmaOfRegisters;

#define CADRE_R8(i)                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])

// clang-format off
#define CADRE_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CADRE_REGISTERS_16 CADRE_R8(0)
#define CADRE_NAMES_32 CADRE_NAMES_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CADRE_REGISTERS_32 CADRE_REGISTERS_16, CADRE_R8(8)
#define CADRE_NAMES_48 CADRE_NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define CADRE_REGISTERS_48 CADRE_REGISTERS_32, CADRE_R8(16)
#define CADRE_NAMES_64 CADRE_NAMES_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define CADRE_REGISTERS_64 CADRE_REGISTERS_48, CADRE_R8(24)
#define CADRE_NAMES_80 CADRE_NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define CADRE_REGISTERS_80 CADRE_REGISTERS_64, CADRE_R8(32)
#define CADRE_NAMES_96 CADRE_NAMES_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define CADRE_REGISTERS_96 CADRE_REGISTERS_80, CADRE_R8(40)
#define CADRE_NAMES_112 CADRE_NAMES_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define CADRE_REGISTERS_112 CADRE_REGISTERS_96, CADRE_R8(48)
#define CADRE_NAMES_128 CADRE_NAMES_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define CADRE_REGISTERS_128 CADRE_REGISTERS_112, CADRE_R8(56)
#define CADRE_NAMES_144 CADRE_NAMES_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define CADRE_REGISTERS_144 CADRE_REGISTERS_128, CADRE_R8(64)
#define CADRE_NAMES_160 CADRE_NAMES_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define CADRE_REGISTERS_160 CADRE_REGISTERS_144, CADRE_R8(72)
#define CADRE_NAMES_176 CADRE_NAMES_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define CADRE_REGISTERS_176 CADRE_REGISTERS_160, CADRE_R8(80)
#define CADRE_NAMES_192 CADRE_NAMES_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define CADRE_REGISTERS_192 CADRE_REGISTERS_176, CADRE_R8(88)
#define CADRE_NAMES_208 CADRE_NAMES_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define CADRE_REGISTERS_208 CADRE_REGISTERS_192, CADRE_R8(96)
#define CADRE_NAMES_224 CADRE_NAMES_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define CADRE_REGISTERS_224 CADRE_REGISTERS_208, CADRE_R8(104)
#define CADRE_NAMES_240 CADRE_NAMES_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define CADRE_REGISTERS_240 CADRE_REGISTERS_224, CADRE_R8(112)
#define CADRE_NAMES_256 CADRE_NAMES_240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define CADRE_REGISTERS_256 CADRE_REGISTERS_240, CADRE_R8(120)

#define CADRE_WGMMA(width, element, type, a_at, b_at, add_at, across_a_at, across_b_at)           \
  template <>                                                                                     \
  struct Wgmma<width, element> {                                                                  \
    template <bool kKMajorA, bool kKMajorB>                                                       \
    __device__ static void multiply_add(float* d, uint64_t a, uint64_t b, bool adds) {            \
      asm volatile(                                                                               \
          "{ .reg .pred add; setp.ne.b32 add, %" #add_at ", 0;"                                   \
          " wgmma.mma_async.sync.aligned.m64n" #width "k16.f32." type "." type                    \
          " {" CADRE_NAMES_##width "}, %" #a_at ", %" #b_at ", add, 1, 1, %" #across_a_at         \
          ", %" #across_b_at "; }"                                                                \
          : CADRE_REGISTERS_##width                                                               \
          : "l"(a), "l"(b), "r"(int(adds)), "n"(int(!kKMajorA)), "n"(int(!kKMajorB)));            \
    }                                                                                             \
  };
#define CADRE_WGMMA_OF_CODES(width, element, type, a_at, b_at, add_at)                            \
  template <>                                                                                     \
  struct WgmmaOfCodes<width, element> {                                                           \
    __device__ static void multiply_add(float* d, uint64_t a, uint64_t b, bool adds) {            \
      asm volatile(                                                                               \
          "{ .reg .pred add; setp.ne.b32 add, %" #add_at ", 0;"                                   \
          " wgmma.mma_async.sync.aligned.m64n" #width "k32.f32." type ".e4m3"                     \
          " {" CADRE_NAMES_##width "}, %" #a_at ", %" #b_at ", add, 1, 1; }"                      \
          : CADRE_REGISTERS_##width                                                               \
          : "l"(a), "l"(b), "r"(int(adds)));                                                      \
    }                                                                                             \
  };
#define CADRE_WGMMA_OF_REGISTERS(width, a0_at, a1_at, a2_at, a3_at, b_at, add_at)                 \
  template <>                                                                                     \
  struct WgmmaOfRegisters<width> {                                                                \
    __device__ static void multiply_add(float* d, const uint32_t* a, uint64_t b, bool adds) {     \
      asm volatile(                                                                               \
          "{ .reg .pred add; setp.ne.b32 add, %" #add_at ", 0;"                                   \
          " wgmma.mma_async.sync.aligned.m64n" #width "k16.f32.bf16.bf16"                         \
          " {" CADRE_NAMES_##width "}, {%" #a0_at ", %" #a1_at ", %" #a2_at ", %" #a3_at          \
          "}, %" #b_at ", add, 1, 1, 0; }"                                                        \
          : CADRE_REGISTERS_##width                                                               \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)));                  \
    }                                                                                             \
  };
#define CADRE_WGMMAS(width, a_at, b_at, add_at, across_a_at, across_b_at)                        \
  CADRE_WGMMA(width, DType::kBf16, "bf16", a_at, b_at, add_at, across_a_at, across_b_at)       \
  CADRE_WGMMA(width, DType::kF16, "f16", a_at, b_at, add_at, across_a_at, across_b_at)         \
  CADRE_WGMMA_OF_CODES(width, DType::kE4m3, "e4m3", a_at, b_at, add_at)                        \
  CADRE_WGMMA_OF_CODES(width, DType::kE5m2, "e5m2", a_at, b_at, add_at)

CADRE_WGMMAS(16, 8, 9, 10, 11, 12)
CADRE_WGMMAS(32, 16, 17, 18, 19, 20)
CADRE_WGMMAS(48, 24, 25, 26, 27, 28)
CADRE_WGMMAS(64, 32, 33, 34, 35, 36)
CADRE_WGMMAS(80, 40, 41, 42, 43, 44)
CADRE_WGMMAS(96, 48, 49, 50, 51, 52)
CADRE_WGMMAS(112, 56, 57, 58, 59, 60)
CADRE_WGMMAS(128, 64, 65, 66, 67, 68)
CADRE_WGMMAS(144, 72, 73, 74, 75, 76)
CADRE_WGMMAS(160, 80, 81, 82, 83, 84)
CADRE_WGMMAS(176, 88, 89, 90, 91, 92)
CADRE_WGMMAS(192, 96, 97, 98, 99, 100)
CADRE_WGMMAS(208, 104, 105, 106, 107, 108)
CADRE_WGMMAS(224, 112, 113, 114, 115, 116)
CADRE_WGMMAS(240, 120, 121, 122, 123, 124)
CADRE_WGMMAS(256, 128, 129, 130, 131, 132)
CADRE_WGMMA_OF_REGISTERS(16, 8, 9, 10, 11, 12, 13)
CADRE_WGMMA_OF_REGISTERS(32, 16, 17, 18, 19, 20, 21)
CADRE_WGMMA_OF_REGISTERS(48, 24, 25, 26, 27, 28, 29)
CADRE_WGMMA_OF_REGISTERS(64, 32, 33, 34, 35, 36, 37)
CADRE_WGMMA_OF_REGISTERS(80, 40, 41, 42, 43, 44, 45)
CADRE_WGMMA_OF_REGISTERS(96, 48, 49, 50, 51, 52, 53)
CADRE_WGMMA_OF_REGISTERS(112, 56, 57, 58, 59, 60, 61)
CADRE_WGMMA_OF_REGISTERS(128, 64, 65, 66, 67, 68, 69)
CADRE_WGMMA_OF_REGISTERS(144, 72, 73, 74, 75, 76, 77)
CADRE_WGMMA_OF_REGISTERS(160, 80, 81, 82, 83, 84, 85)
CADRE_WGMMA_OF_REGISTERS(176, 88, 89, 90, 91, 92, 93)
CADRE_WGMMA_OF_REGISTERS(192, 96, 97, 98, 99, 100, 101)
CADRE_WGMMA_OF_REGISTERS(208, 104, 105, 106, 107, 108, 109)
CADRE_WGMMA_OF_REGISTERS(224, 112, 113, 114, 115, 116, 117)
CADRE_WGMMA_OF_REGISTERS(240, 120, 121, 122, 123, 124, 125)
CADRE_WGMMA_OF_REGISTERS(256, 128, 129, 130, 131, 132, 133)
// clang-format on

#undef CADRE_WGMMAS
#undef CADRE_WGMMA_OF_REGISTERS
#undef CADRE_WGMMA_OF_CODES
#undef CADRE_WGMMA
#undef CADRE_R8
#undef CADRE_NAMES_16
#undef CADRE_REGISTERS_16
#undef CADRE_NAMES_32
#undef CADRE_REGISTERS_32
#undef CADRE_NAMES_48
#undef CADRE_REGISTERS_48
#undef CADRE_NAMES_64
#undef CADRE_REGISTERS_64
#undef CADRE_NAMES_80
#undef CADRE_REGISTERS_80
#undef CADRE_NAMES_96
#undef CADRE_REGISTERS_96
#undef CADRE_NAMES_112
#undef CADRE_REGISTERS_112
#undef CADRE_NAMES_128
#undef CADRE_REGISTERS_128
#undef CADRE_NAMES_144
#undef CADRE_REGISTERS_144
#undef CADRE_NAMES_160
#undef CADRE_REGISTERS_160
#undef CADRE_NAMES_176
#undef CADRE_REGISTERS_176
#undef CADRE_NAMES_192
#undef CADRE_REGISTERS_192
#undef CADRE_NAMES_208
#undef CADRE_REGISTERS_208
#undef CADRE_NAMES_224
#undef CADRE_REGISTERS_224
#undef CADRE_NAMES_240
#undef CADRE_REGISTERS_240
#undef CADRE_NAMES_256
#undef CADRE_REGISTERS_256

}  // namespace cadre::cuda
