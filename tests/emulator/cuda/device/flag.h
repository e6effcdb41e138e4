#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "tests/emulator/machine.h"

// The words of src/cuda/device/flag.h in plain C++: other ranks are threads or processes of the
// host.
namespace cadre::cuda {

inline uint32_t load_acquire_system(const uint32_t* word) {
  return std::atomic_ref(*const_cast<uint32_t*>(word)).load(std::memory_order_acquire);
}
inline uint64_t load_acquire_system(const uint64_t* word) {
  return std::atomic_ref(*const_cast<uint64_t*>(word)).load(std::memory_order_acquire);
}
template <class Word>
void store_release_system(Word* word, Word value) {
  std::atomic_ref(*word).store(value, std::memory_order_release);
}
template <class Word>
Word load_relaxed_system(const Word* word) {
  return std::atomic_ref(*const_cast<Word*>(word)).load(std::memory_order_relaxed);
}
inline void store_relaxed_system(uint64_t* word, uint64_t value) {
  std::atomic_ref(*word).store(value, std::memory_order_relaxed);
}
inline void fence_system() { std::atomic_thread_fence(std::memory_order_acq_rel); }
inline void fence_device() { fence_system(); }
inline uint32_t add_acquire(uint32_t* word, uint32_t value) {
  return std::atomic_ref(*word).fetch_add(value, std::memory_order_acquire);
}
inline uint64_t nanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}
/// Threads of a block that rest let the others of it run; what they wait for may be another rank's.
inline void rest() {
  constexpr unsigned kRests = 16;  // of any threads, for one of the host's
  thread_local unsigned rests = 0;
  if (rests++ % kRests == 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
  emulator::may_switch();
}

}  // namespace cadre::cuda
