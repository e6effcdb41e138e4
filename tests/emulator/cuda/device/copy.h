#pragma once
#include <cstdint>
#include <cstring>
#include <memory>

#include "tests/emulator/machine.h"

// The words of src/cuda/device/copy.h in plain C++. A copy happens at any moment between its start
// and the end of the wait for it.
namespace cadre::cuda {

/// The first `bytes` of `whole`; the others become zero.
inline void start_copy(uint32_t to, const void* from, int whole, int bytes) {
  std::shared_ptr<emulator::CopyGroup>& open = emulator::self().open_copies;
  if (open == nullptr) open = std::make_shared<emulator::CopyGroup>();
  ++open->left;
  emulator::later([group = open, place = emulator::from_shared(to, whole), from, whole, bytes] {
    std::memset(place, 0, size_t(whole));
    std::memcpy(place, from, size_t(bytes));
    if (--group->left == 0) emulator::notify(group.get());
  });
}

inline void cp_async(uint32_t to, const void* from, int bytes) {
  emulator::expect(to % 16 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0,
                   "a copy of sixteen bytes is not aligned");
  emulator::expect(bytes >= 0 && bytes <= 16, "a copy has more than sixteen bytes");
  start_copy(to, from, 16, bytes);
}

inline void cp_async_line(uint32_t to, const void* from, int bytes) { cp_async(to, from, bytes); }
inline void cp_async_line(uint32_t to, const void* from) { cp_async(to, from, 16); }

inline void cp_async_word(uint32_t to, const void* from) {
  emulator::expect(to % 4 == 0 && reinterpret_cast<uintptr_t>(from) % 4 == 0,
                   "a copy of four bytes is not aligned");
  start_copy(to, from, 4, 4);
}

inline void cp_async_commit() {
  emulator::Thread& t = emulator::self();
  if (t.open_copies == nullptr) t.open_copies = std::make_shared<emulator::CopyGroup>();
  t.copy_groups.push_back(std::exchange(t.open_copies, nullptr));
}

template <int kLeft>
inline void cp_async_wait() {
  emulator::Thread& t = emulator::self();
  while (t.copy_groups.size() > size_t(kLeft)) {
    const auto oldest = t.copy_groups.front();
    emulator::wait_until(oldest.get(), "copies", [&] { return oldest->left == 0; });
    t.copy_groups.pop_front();
  }
}

}  // namespace cadre::cuda
