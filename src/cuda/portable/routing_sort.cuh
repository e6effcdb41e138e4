#pragma once
#include <cstdint>

// Sorts few numbers of a thread, which stay in registers: the greatest first.
namespace cadre::cuda::portable {

__device__ inline void exchange(uint32_t& first, uint32_t& second) {
  const uint32_t greater = max(first, second);
  second = min(first, second);
  first = greater;
}

/// Batcher's odd-even merge of the two sorted halves of key[kFirst], key[kFirst + kStep], ....
template <int kFirst, int kCount, int kStep>
__device__ void merge_halves(uint32_t* key) {
  if constexpr (2 * kStep < kCount) {
    merge_halves<kFirst, kCount, 2 * kStep>(key);
    merge_halves<kFirst + kStep, kCount, 2 * kStep>(key);
#pragma unroll
    for (int i = kFirst + kStep; i + kStep < kFirst + kCount; i += 2 * kStep)
      exchange(key[i], key[i + kStep]);
  } else {
    exchange(key[kFirst], key[kFirst + kStep]);
  }
}

/// Sorts key[kFirst], ..., key[kFirst + kCount - 1]; kCount is a power of two.
template <int kFirst, int kCount>
__device__ void sort(uint32_t* key) {
  if constexpr (kCount > 1) {
    sort<kFirst, kCount / 2>(key);
    sort<kFirst + kCount / 2, kCount / 2>(key);
    merge_halves<kFirst, kCount, 1>(key);
  }
}

/// Leaves the kCount greatest of twice as many in the first half, sorted. Both halves are sorted.
template <int kCount>
__device__ void keep_greater_half(uint32_t* key) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) key[i] = max(key[i], key[2 * kCount - 1 - i]);
#pragma unroll
  for (int step = kCount / 2; step > 0; step /= 2)
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if ((i & step) == 0) exchange(key[i], key[i + step]);
}

}  // namespace cadre::cuda::portable
