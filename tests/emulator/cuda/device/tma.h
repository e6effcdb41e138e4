#pragma once
#include <cuda.h>

#include <cstdint>

#include "cuda/device/barrier.h"
#include "tests/emulator/tensor_map.h"

// The words of src/cuda/device/tma.h in plain C++. A copy happens at any later moment.
namespace cadre::cuda {

struct Box3 {
  int x, y, z;
};
struct Box4 {
  int x, y, z, w;
};
struct Box5 {
  int x, y, z, w, v;
};

inline void replace_address(CUtensorMap& map, const void* address) {
  emulator::MapData data = emulator::data_of(map);
  data.base = reinterpret_cast<uintptr_t>(address);
  map = emulator::map_of(data);
}
inline void tensormap_release(const CUtensorMap&) {}
inline void tensormap_acquire(const CUtensorMap&) {}

inline void tma_load(void* to, const CUtensorMap& map, const Box4& at, Barrier& barrier,
                     uint16_t blocks) {
  emulator::start_load(to, map, {at.x, at.y, at.z, at.w, 0}, {&barrier, blocks});
}
inline uint16_t only_this_block() { return uint16_t(1 << emulator::self().block->rank); }
inline void tma_load(void* to, const CUtensorMap& map, const Box4& at, Barrier& barrier) {
  tma_load(to, map, at, barrier, only_this_block());
}
inline void tma_load(void* to, const CUtensorMap& map, const Box3& at, Barrier& barrier,
                     uint16_t blocks) {
  emulator::start_load(to, map, {at.x, at.y, at.z, 0, 0}, {&barrier, blocks});
}
inline void tma_load(void* to, const CUtensorMap& map, const Box3& at, Barrier& barrier) {
  tma_load(to, map, at, barrier, only_this_block());
}
inline void tma_load(void* to, const CUtensorMap& map, const Box5& at, Barrier& barrier,
                     uint16_t blocks) {
  emulator::start_load(to, map, {at.x, at.y, at.z, at.w, at.v}, {&barrier, blocks});
}
inline void tma_load(void* to, const CUtensorMap& map, const Box5& at, Barrier& barrier) {
  tma_load(to, map, at, barrier, only_this_block());
}

inline void bulk_load(void* to, const void* from, uint32_t bytes, Barrier& barrier) {
  emulator::start_bulk_load(to, from, bytes, {&barrier, only_this_block()});
}

inline void tma_store(const CUtensorMap& map, const Box3& at, const void* from) {
  emulator::start_store(map, {at.x, at.y, at.z, 0, 0}, from, false);
}
inline void tma_store(const CUtensorMap& map, const Box4& at, const void* from) {
  emulator::start_store(map, {at.x, at.y, at.z, at.w, 0}, from, false);
}
inline void tma_reduce_add(const CUtensorMap& map, const Box3& at, const void* from) {
  emulator::start_store(map, {at.x, at.y, at.z, 0, 0}, from, true);
}

inline void tma_commit() { emulator::tma_commit(); }
template <int kLeft>
inline void tma_wait_read() {
  emulator::tma_wait(kLeft, false);
}
inline void tma_wait() { emulator::tma_wait(0, true); }

inline void fence_proxy_async() {}

}  // namespace cadre::cuda
