#pragma once
#include <cstdint>
#include <cstring>

#include "tests/emulator/machine.h"

// The words of src/cuda/device/word.h in plain C++.
namespace cadre::cuda {

inline void prefetch_line(const char* address) {
  emulator::expect(address != nullptr, "a line has no address");
}

inline void store_word_below(int number, int below, uint8_t* to, uint32_t word) {
  if (number >= below) return;
  emulator::expect(reinterpret_cast<uintptr_t>(to) % 4 == 0, "a word is not aligned");
  std::memcpy(to, &word, sizeof(word));
}

template <class Words>
void store_words_below(int number, int below, uint8_t* to, Words words) {
  if (number >= below) return;
  emulator::expect(reinterpret_cast<uintptr_t>(to) % sizeof(words) == 0, "words are not aligned");
  std::memcpy(to, &words, sizeof(words));
}

inline int thread_x() { return int(threadIdx.x); }

inline uint4 words_anew(uint4 words) { return words; }

template <class Byte>
Byte* as_one_number(Byte* address) {
  return address;
}

}  // namespace cadre::cuda
