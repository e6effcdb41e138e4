#pragma once
#include <cstdint>
#include <vector>

#include "cuda/device/barrier.h"
#include "formats/bf16.h"
#include "formats/fp16.h"

// The words of src/cuda/device/wgmma.h in plain C++. A product happens at any moment between the
// last thread's call and the end of the wait for it, and reads shared memory only then.
namespace cadre::cuda {

template <bool kAlong>
inline uint64_t matrix(const void* memory, int slab_bytes) {
  const uint64_t eight_rows = 1024 >> 4, slab = kAlong ? 1 : uint64_t(slab_bytes) >> 4;
  const uint64_t swizzle_128 = uint64_t(1) << 62;
  const uint64_t first = (shared_address(memory) & 0x3ffff) >> 4;
  return swizzle_128 | eight_rows << 32 | slab << 16 | first;
}

template <bool kAlong>
constexpr uint64_t kDescriptorStep = (kAlong ? 16 * 2 : 16 * 128) >> 4;

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

template <int kSums>
inline void pin(float* sums) {
  asm volatile("" ::"r"(sums) : "memory");
}

template <int kIncrease>
inline void setmaxnreg_inc() {}
template <int kDecrease>
inline void setmaxnreg_dec() {}

enum class Element { kBf16, kF16 };

/// `count` rows across the contraction, sixteen deep, of the operand that a descriptor names.
std::vector<float> operand(uint64_t descriptor, bool along, int count, Element,
                           const uint8_t* shared);

/// Hands in this thread's part of a product of 64 rows and `width` columns.
struct ProductShape {
  int width;
  Element element;
  bool along_a, along_b;
};
void issue_wgmma(const ProductShape&, float* sums, uint64_t a, uint64_t b, bool to_sums);

template <int kWidth, Element kElement>
struct Product {
  template <bool kAlongA, bool kAlongB>
  static void add(float* d, uint64_t a, uint64_t b, bool to_sums) {
    static_assert(kWidth % 8 == 0 && kWidth >= 8 && kWidth <= 256);
    issue_wgmma({kWidth, kElement, kAlongA, kAlongB}, d, a, b, to_sums);
  }
};

}  // namespace cadre::cuda
