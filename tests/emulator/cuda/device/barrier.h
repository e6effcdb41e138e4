#pragma once
#include <cstdint>

#include "tests/emulator/machine.h"

// The words of src/cuda/device/barrier.h in plain C++.
namespace cadre::cuda {

using Barrier = uint64_t;

/// A barrier's 64 bits.
struct BarrierState {
  uint32_t phase : 1, count : 15, pending : 16;
  int32_t bytes;
};

inline BarrierState state_of(const Barrier& barrier) {
  const auto state = std::bit_cast<BarrierState>(barrier);
  emulator::expect(state.count > 0 && state.count < 2048 && state.pending <= state.count,
                   "a barrier was not initialised");
  return state;
}

inline void settle(Barrier& barrier, BarrierState state) {
  if (state.pending == 0 && state.bytes == 0) {
    state.phase = !state.phase;
    state.pending = state.count;
    emulator::notify(&barrier);
  }
  barrier = std::bit_cast<Barrier>(state);
}

inline uint32_t shared_address(const void* memory) { return emulator::shared_offset(memory); }

inline void init(Barrier& barrier, int arrivals) {
  barrier = std::bit_cast<Barrier>(
      BarrierState{0, uint32_t(arrivals) & 0x7fff, uint32_t(arrivals) & 0xffff, 0});
}

inline void fence_mbarrier_init() {}

inline void arrive(Barrier& barrier) {
  BarrierState state = state_of(barrier);
  emulator::expect(state.pending > 0, "a barrier counts more arrivals than it waits for");
  state.pending = (state.pending - 1) & 0xffff;
  settle(barrier, state);
  emulator::may_switch();
}

inline void arrive_cluster(Barrier& barrier, uint32_t block) {
  arrive(*static_cast<Barrier*>(emulator::in_block(&barrier, int(block))));
}

inline void arrive_expect_tx(Barrier& barrier, uint32_t bytes) {
  BarrierState state = state_of(barrier);
  state.bytes += int32_t(bytes);
  barrier = std::bit_cast<Barrier>(state);
  arrive(barrier);
}

/// Bytes that TMA has transferred.
inline void deliver(Barrier& barrier, uint32_t bytes) {
  BarrierState state = state_of(barrier);
  state.bytes -= int32_t(bytes);
  settle(barrier, state);
}

inline void st_async(int64_t& to, int64_t value, Barrier& barrier, uint32_t block) {
  auto* there = static_cast<int64_t*>(emulator::in_block(&to, int(block)));
  auto* counted = static_cast<Barrier*>(emulator::in_block(&barrier, int(block)));
  emulator::later([=] {
    *there = value;
    deliver(*counted, sizeof(value));
  });
}

inline bool try_wait(Barrier& barrier, uint32_t parity) {
  emulator::may_switch();
  if (state_of(barrier).phase != parity) return true;
  emulator::poll();
  return state_of(barrier).phase != parity;
}

inline void wait(Barrier& barrier, uint32_t parity) {
  emulator::wait_until(&barrier, "a barrier in shared memory",
                       [&] { return state_of(barrier).phase != parity; });
}

inline void wait_asleep(Barrier& barrier, uint32_t parity) { wait(barrier, parity); }

inline bool elect() {
  __syncwarp();
  return threadIdx.x % 32 == 0;
}

inline uint32_t cluster_ctarank() { return uint32_t(emulator::self().block->rank); }

inline void cluster_sync() { emulator::meet_cluster(); }

}  // namespace cadre::cuda
