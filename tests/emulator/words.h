#pragma once
// Put before every file of src/cuda that is compiled for the emulator: what nvcc knows by itself.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

#include "tests/emulator/machine.h"

#undef __global__
#undef __device__
#undef __shared__
#undef __launch_bounds__
#undef __noinline__
#undef __cluster_dims__
#undef __grid_constant__
#define __global__
#define __device__
// One block at a time runs on a thread of the host; clusters keep to dynamic shared memory.
#define __shared__ static thread_local
#define __launch_bounds__(...)
#define __noinline__
#define __cluster_dims__(...)
#define __grid_constant__
#define __builtin_assume(what) ::cadre::emulator::expect(what, "an assumption does not hold")
#define threadIdx ::cadre::emulator::builtins.thread
#define blockIdx ::cadre::emulator::builtins.block
#define blockDim ::cadre::emulator::builtins.block_dim
#define gridDim ::cadre::emulator::builtins.grid_dim

// The intrinsics of CUDA that kernels here use. Lanes that a mask leaves out do not come.
inline void __syncthreads() {
  cadre::emulator::meet(cadre::emulator::self().block->meetings[0], 1 << 30, "__syncthreads");
}
inline int __syncthreads_or(int predicate) {
  return cadre::emulator::meet(cadre::emulator::self().block->meetings[0], 1 << 30,
                               "__syncthreads_or", predicate != 0);
}
inline void __syncwarp(unsigned mask = ~0u) {
  cadre::emulator::expect(mask == ~0u, "__syncwarp of some lanes is not emulated");
  cadre::emulator::show(0);
}
inline void __threadfence() {}
inline void __threadfence_block() {}

namespace cadre::emulator {

/// What lane `from(lane)` shows; a lane's own value where that is outside of its part of the warp.
template <class T, class From>
T shuffle(unsigned mask, T value, int width, From&& from) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  expect(mask == ~0u, "a shuffle of some lanes is not emulated");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const int lane = self().number % kWarp, first = lane / width * width, source = from(lane);
  const auto& shown = show(bits);
  if (source < first || source >= first + width) return value;
  std::memcpy(&value, &shown[size_t(source)], sizeof(T));
  return value;
}

}  // namespace cadre::emulator

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return cadre::emulator::shuffle(mask, value, width, [&](int lane) {
    return lane / width * width + (source % width + width) % width;
  });
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned step, int width = 32) {
  return cadre::emulator::shuffle(mask, value, width, [&](int lane) { return lane - int(step); });
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned step, int width = 32) {
  return cadre::emulator::shuffle(mask, value, width, [&](int lane) { return lane + int(step); });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  return cadre::emulator::shuffle(mask, value, width, [&](int lane) { return lane ^ bits; });
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  cadre::emulator::expect(mask == ~0u, "a ballot of some lanes is not emulated");
  const auto& shown = cadre::emulator::show(predicate != 0);
  unsigned all = 0;
  for (int lane = 0; lane < cadre::emulator::self().lanes(); ++lane)
    all |= unsigned(shown[size_t(lane)]) << lane;
  return all;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

// Threads of the host share the emulator's device memory, but no grid.
template <class T>
T atomicAdd(T* at, T value) {
  const T old = *at;
  *at = T(old + value);
  cadre::emulator::may_switch();
  return old;
}
template <class T>
T atomicMax(T* at, T value) {
  const T old = *at;
  *at = std::max(old, value);
  cadre::emulator::may_switch();
  return old;
}
template <class T>
T atomicMin(T* at, T value) {
  const T old = *at;
  *at = std::min(old, value);
  cadre::emulator::may_switch();
  return old;
}

template <class T>
T atomicOr(T* at, T value) {
  const T old = *at;
  *at = T(old | value);
  cadre::emulator::may_switch();
  return old;
}

template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
  cadre::emulator::expect(mask == ~0u, "a match of some lanes is not emulated");
  const uint64_t mine = uint64_t(value);
  const auto& shown = cadre::emulator::show(mine);
  unsigned all = 0;
  for (int lane = 0; lane < cadre::emulator::self().lanes(); ++lane)
    all |= unsigned(shown[size_t(lane)] == mine) << lane;
  return all;
}
template <class T, class Join>
T reduce_warp(T value, Join&& join) {
  const auto& shown = cadre::emulator::show(uint64_t(value));
  value = T(shown[0]);
  for (int lane = 1; lane < cadre::emulator::self().lanes(); ++lane)
    value = join(value, T(shown[size_t(lane)]));
  return value;
}
template <class T>
T __reduce_max_sync(unsigned, T value) {
  return reduce_warp(value, [](T a, T b) { return std::max(a, b); });
}
template <class T>
T __reduce_add_sync(unsigned, T value) {
  return reduce_warp(value, [](T a, T b) { return T(a + b); });
}
template <class T>
T __reduce_min_sync(unsigned, T value) {
  return reduce_warp(value, [](T a, T b) { return std::min(a, b); });
}

using std::isnan;
using std::max;
using std::min;

inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = low | uint64_t(high) << 32;
  unsigned picked = 0;
  for (int i = 0; i < 4; ++i)
    picked |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return picked;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xffff, b & 0xffff);
}
inline int __vimin3_s32(int a, int b, int c) { return std::min({a, b, c}); }
inline int __viaddmin_s32(int a, int b, int c) { return std::min(a + b, c); }
inline int __ffs(int bits) { return bits == 0 ? 0 : std::countr_zero(unsigned(bits)) + 1; }
inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __clz(int bits) { return std::countl_zero(unsigned(bits)); }
