#pragma once
#include <cstdint>
#include <vector>

#include "cadre/dtype.h"
#include "cuda/device/barrier.h"
#include "formats/bf16.h"
#include "formats/fp16.h"
#include "formats/small_float.h"

// The words of src/cuda/device/wgmma.h in plain C++. A product happens at any moment between the
// last thread's call and the end of the wait for it, and reads shared memory only then.
namespace cadre::cuda {

constexpr int kAtomBytes = 128;

template <bool kKMajor>
inline uint64_t matrix_descriptor(const void* memory, int panel_bytes) {
  const uint64_t eight_rows = (8 * kAtomBytes) >> 4;
  const uint64_t panel = kKMajor ? 1 : uint64_t(panel_bytes) >> 4;
  const uint64_t swizzle_128 = uint64_t(1) << 62;
  const uint64_t first = (shared_address(memory) & 0x3ffff) >> 4;
  return swizzle_128 | eight_rows << 32 | panel << 16 | first;
}

template <bool kKMajor>
constexpr uint64_t kDescriptorStep = (kKMajor ? 32 : 16 * kAtomBytes) >> 4;

inline void wgmma_fence() {}

inline void wgmma_commit() {
  emulator::Thread& t = emulator::self();
  t.product_groups.push_back(t.products);
}

template <int kLeft>
inline void wgmma_wait() {
  emulator::Thread& t = emulator::self();
  while (int(t.product_groups.size()) > kLeft) {
    const int64_t wanted = t.product_groups.front();
    emulator::Warpgroup& group = t.warpgroup();
    emulator::wait_until(&group, "products", [&] { return group.done >= wanted; });
    t.product_groups.pop_front();
  }
}

template <int kCount>
inline void pin(float* accumulators) {
  asm volatile("" ::"r"(accumulators) : "memory");
}
template <int kCount>
inline void pin(uint32_t* operand) {
  asm volatile("" ::"r"(operand) : "memory");
}

template <int kIncrease>
inline void setmaxnreg_inc() {}
template <int kDecrease>
inline void setmaxnreg_dec() {}

/// `count` rows across the contraction, 32 bytes deep, of the operand that a descriptor names.
std::vector<float> operand(uint64_t descriptor, bool k_major, int count, DType,
                           const uint8_t* shared);

/// Hands in this thread's part of a product of 64 rows and `width` columns.
struct ProductShape {
  int width;
  DType a, b;
  bool k_major_a, k_major_b;
};
void issue_wgmma(const ProductShape&, float* accumulators, uint64_t a, uint64_t b, bool adds);

template <int kWidth, DType kDType>
struct Wgmma {
  template <bool kKMajorA, bool kKMajorB>
  static void multiply_add(float* d, uint64_t a, uint64_t b, bool adds) {
    static_assert(kWidth % 8 == 0 && kWidth >= 8 && kWidth <= 256);
    issue_wgmma({kWidth, kDType, kDType, kKMajorA, kKMajorB}, d, a, b, adds);
  }
};

template <int kWidth, DType kDType>
struct WgmmaOfCodes {
  static void multiply_add(float* d, uint64_t a, uint64_t b, bool adds) {
    static_assert(kWidth % 8 == 0 && kWidth >= 8 && kWidth <= 256);
    issue_wgmma({kWidth, kDType, DType::kE4m3, true, true}, d, a, b, adds);
  }
};

/// Reads the registers of `a` only when the product happens.
void issue_wgmma_of_registers(int width, float* accumulators, const uint32_t* a, uint64_t b,
                              bool adds);

template <int kWidth>
struct WgmmaOfRegisters {
  static void multiply_add(float* d, const uint32_t* a, uint64_t b, bool adds) {
    static_assert(kWidth % 8 == 0 && kWidth >= 8 && kWidth <= 256);
    issue_wgmma_of_registers(kWidth, d, a, b, adds);
  }
};

}  // namespace cadre::cuda
