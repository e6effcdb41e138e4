#pragma once
#include <cstdint>

#include "cuda/device/barrier.h"

// Products of the tensor cores of Hopper (wgmma): a warpgroup, four warps, multiplies 64 rows of a
// tile of A by a tile of B, both in shared memory, sixteen deep, and adds to sums in registers.
// Elements lie in rows of 128 bytes, swizzled as TMA writes them. One wrapper, one
// instruction.
//
// Source    the matrix descriptors and fragments of the PTX manual, section wgmma.
namespace cadre::cuda {

/// Where an operand lies. `kAlong`: its rows of 128 bytes run along the contraction; else across
/// it, 64 elements a slab, and slabs are `slab_bytes` apart.
template <bool kAlong>
__device__ inline uint64_t matrix(const void* memory, int slab_bytes) {
  const uint64_t eight_rows = 1024 >> 4, slab = kAlong ? 1 : uint64_t(slab_bytes) >> 4;
  const uint64_t swizzle_128 = uint64_t(1) << 62;
  const uint64_t first = (shared_address(memory) & 0x3ffff) >> 4;
  return swizzle_128 | eight_rows << 32 | slab << 16 | first;
}

/// From sixteen elements of the contraction to the next: what to add to matrix().
template <bool kAlong>
constexpr uint64_t kDescriptorStep = (kAlong ? 16 * 2 : 16 * 128) >> 4;

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits for all but the youngest `kLeft` groups.
template <int kLeft>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

/// Keeps the compiler from moving reads and writes of sums over a fence or a wait.
template <int kSums>
__device__ inline void pin(float* sums) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

template <int kIncrease>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kIncrease));
}
template <int kDecrease>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kDecrease));
}

/// Element types of A and B.
enum class Element { kBf16, kF16 };

/// sums[64, kWidth] += a[64, 16] * b[16, kWidth], for widths that are multiples of 16. Thread t of
/// the warpgroup holds, for every eight columns j, columns 8 j + 2 (t % 4) and the next of row
/// 16 (t / 32) + t % 32 / 4 in sums[4 j] and sums[4 j + 1], and of the row eight below in the next
/// two.
template <int kWidth, Element kElement>
struct Product;

#define CADRE_R8(i)                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])

// clang-format off
#define CADRE_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CADRE_SUMS_16 CADRE_R8(0)
#define CADRE_NAMES_32 CADRE_NAMES_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CADRE_SUMS_32 CADRE_SUMS_16, CADRE_R8(8)
#define CADRE_NAMES_48 CADRE_NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define CADRE_SUMS_48 CADRE_SUMS_32, CADRE_R8(16)
#define CADRE_NAMES_64 CADRE_NAMES_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define CADRE_SUMS_64 CADRE_SUMS_48, CADRE_R8(24)
#define CADRE_NAMES_80 CADRE_NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define CADRE_SUMS_80 CADRE_SUMS_64, CADRE_R8(32)
#define CADRE_NAMES_96 CADRE_NAMES_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define CADRE_SUMS_96 CADRE_SUMS_80, CADRE_R8(40)
#define CADRE_NAMES_112 CADRE_NAMES_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define CADRE_SUMS_112 CADRE_SUMS_96, CADRE_R8(48)
#define CADRE_NAMES_128 CADRE_NAMES_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define CADRE_SUMS_128 CADRE_SUMS_112, CADRE_R8(56)
#define CADRE_NAMES_144 CADRE_NAMES_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define CADRE_SUMS_144 CADRE_SUMS_128, CADRE_R8(64)
#define CADRE_NAMES_160 CADRE_NAMES_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define CADRE_SUMS_160 CADRE_SUMS_144, CADRE_R8(72)
#define CADRE_NAMES_176 CADRE_NAMES_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define CADRE_SUMS_176 CADRE_SUMS_160, CADRE_R8(80)
#define CADRE_NAMES_192 CADRE_NAMES_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define CADRE_SUMS_192 CADRE_SUMS_176, CADRE_R8(88)
#define CADRE_NAMES_208 CADRE_NAMES_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define CADRE_SUMS_208 CADRE_SUMS_192, CADRE_R8(96)
#define CADRE_NAMES_224 CADRE_NAMES_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define CADRE_SUMS_224 CADRE_SUMS_208, CADRE_R8(104)
#define CADRE_NAMES_240 CADRE_NAMES_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define CADRE_SUMS_240 CADRE_SUMS_224, CADRE_R8(112)
#define CADRE_NAMES_256 CADRE_NAMES_240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define CADRE_SUMS_256 CADRE_SUMS_240, CADRE_R8(120)

#define CADRE_PRODUCT(width, element, type, a_at, b_at, add_at, across_a_at, across_b_at)          \
  template <>                                                                                      \
  struct Product<width, element> {                                                                 \
    template <bool kAlongA, bool kAlongB>                                                          \
    __device__ static void add(float* d, uint64_t a, uint64_t b, bool to_sums) {                   \
      asm volatile(                                                                                \
          "{ .reg .pred add; setp.ne.b32 add, %" #add_at ", 0;"                                    \
          " wgmma.mma_async.sync.aligned.m64n" #width "k16.f32." type "." type                     \
          " {" CADRE_NAMES_##width "}, %" #a_at ", %" #b_at ", add, 1, 1, %" #across_a_at          \
          ", %" #across_b_at "; }"                                                                 \
          : CADRE_SUMS_##width                                                                     \
          : "l"(a), "l"(b), "r"(int(to_sums)), "n"(int(!kAlongA)), "n"(int(!kAlongB)));            \
    }                                                                                              \
  };
#define CADRE_PRODUCTS(width, a_at, b_at, add_at, across_a_at, across_b_at)                        \
  CADRE_PRODUCT(width, Element::kBf16, "bf16", a_at, b_at, add_at, across_a_at, across_b_at)       \
  CADRE_PRODUCT(width, Element::kF16, "f16", a_at, b_at, add_at, across_a_at, across_b_at)

CADRE_PRODUCTS(16, 8, 9, 10, 11, 12)
CADRE_PRODUCTS(32, 16, 17, 18, 19, 20)
CADRE_PRODUCTS(48, 24, 25, 26, 27, 28)
CADRE_PRODUCTS(64, 32, 33, 34, 35, 36)
CADRE_PRODUCTS(80, 40, 41, 42, 43, 44)
CADRE_PRODUCTS(96, 48, 49, 50, 51, 52)
CADRE_PRODUCTS(112, 56, 57, 58, 59, 60)
CADRE_PRODUCTS(128, 64, 65, 66, 67, 68)
CADRE_PRODUCTS(144, 72, 73, 74, 75, 76)
CADRE_PRODUCTS(160, 80, 81, 82, 83, 84)
CADRE_PRODUCTS(176, 88, 89, 90, 91, 92)
CADRE_PRODUCTS(192, 96, 97, 98, 99, 100)
CADRE_PRODUCTS(208, 104, 105, 106, 107, 108)
CADRE_PRODUCTS(224, 112, 113, 114, 115, 116)
CADRE_PRODUCTS(240, 120, 121, 122, 123, 124)
CADRE_PRODUCTS(256, 128, 129, 130, 131, 132)
// clang-format on

#undef CADRE_PRODUCTS
#undef CADRE_PRODUCT
#undef CADRE_R8
#undef CADRE_NAMES_16
#undef CADRE_SUMS_16
#undef CADRE_NAMES_32
#undef CADRE_SUMS_32
#undef CADRE_NAMES_48
#undef CADRE_SUMS_48
#undef CADRE_NAMES_64
#undef CADRE_SUMS_64
#undef CADRE_NAMES_80
#undef CADRE_SUMS_80
#undef CADRE_NAMES_96
#undef CADRE_SUMS_96
#undef CADRE_NAMES_112
#undef CADRE_SUMS_112
#undef CADRE_NAMES_128
#undef CADRE_SUMS_128
#undef CADRE_NAMES_144
#undef CADRE_SUMS_144
#undef CADRE_NAMES_160
#undef CADRE_SUMS_160
#undef CADRE_NAMES_176
#undef CADRE_SUMS_176
#undef CADRE_NAMES_192
#undef CADRE_SUMS_192
#undef CADRE_NAMES_208
#undef CADRE_SUMS_208
#undef CADRE_NAMES_224
#undef CADRE_SUMS_224
#undef CADRE_NAMES_240
#undef CADRE_SUMS_240
#undef CADRE_NAMES_256
#undef CADRE_SUMS_256

}  // namespace cadre::cuda
