#pragma once
#include <cstdint>

#include "cuda/device/barrier.h"
#include "formats/bf16.h"
#include "formats/fp16.h"

// The words of src/cuda/device/matrices.h in plain C++.
namespace cadre::cuda {

struct Matrices {
  uint32_t a, b, c, d;
};

inline uint32_t pack_bf16(float first, float second) {
  return formats::Bf16::encode(first) | uint32_t(formats::Bf16::encode(second)) << 16;
}
inline uint32_t pack_f16(float first, float second) {
  return formats::Fp16::encode(first) | uint32_t(formats::Fp16::encode(second)) << 16;
}
struct Pair {
  float first, second;
};
inline Pair unpack_bf16(uint32_t both) {
  return {formats::Bf16::decode(uint16_t(both)), formats::Bf16::decode(uint16_t(both >> 16))};
}
inline Pair unpack_f16(uint32_t both) {
  return {formats::Fp16::decode(uint16_t(both)), formats::Fp16::decode(uint16_t(both >> 16))};
}

template <int kHalf>
inline uint32_t twice(uint32_t both) {
  return kHalf == 0 ? (both & 0xffffu) * 0x10001u : (both >> 16) * 0x10001u;
}
inline uint32_t mul_bf16(uint32_t a, uint32_t b) {
  const Pair x = unpack_bf16(a), y = unpack_bf16(b);
  return pack_bf16(x.first * y.first, x.second * y.second);
}

inline uint32_t subtract(uint32_t a, uint32_t b) { return a - b; }

inline float add_rounded(float a, float b) { return a + b; }

/// Each lane writes the row whose place it names; element j of row i of a matrix is in half j % 2
/// of the word of lane 4 i + j / 2, or of row j and element i if transposed.
inline void put_rows(uint32_t to, const Matrices& m, bool transposed, int matrices = 4) {
  const uint32_t mine[4] = {m.a, m.b, m.c, m.d};
  const int lane = emulator::self().number % emulator::kWarp;
  uint16_t row[8] = {};
  for (int which = 0; which < 4; ++which) {
    const auto& shown = emulator::show(mine[which]);
    if (lane / 8 != which) continue;
    for (int i = 0; i < 8; ++i) {
      const int line = transposed ? i : lane % 8, column = transposed ? lane % 8 : i;
      row[i] = uint16_t(shown[size_t(4 * line + column / 2)] >> (column % 2 * 16));
    }
  }
  if (lane / 8 >= matrices) return;
  emulator::expect(to % 16 == 0, "a row of a matrix is not aligned");
  std::memcpy(emulator::from_shared(to, 16), row, 16);
}

inline void stmatrix(uint32_t to, const Matrices& m) { put_rows(to, m, false); }
inline void stmatrix(uint32_t to, uint32_t a, uint32_t b) { put_rows(to, {a, b, 0, 0}, false, 2); }
inline void stmatrix_trans(uint32_t to, const Matrices& m) { put_rows(to, m, true); }
inline void stmatrix_trans(uint32_t to, uint32_t a) { put_rows(to, {a, 0, 0, 0}, true, 1); }
inline void stmatrix_trans(uint32_t to, uint32_t a, uint32_t b) {
  put_rows(to, {a, b, 0, 0}, true, 2);
}

/// The word that this lane gets of each matrix: elements 2 (t % 4) and the next of row t / 4, or of
/// that column.
inline Matrices get_rows(uint32_t from, bool transposed) {
  emulator::expect(from % 16 == 0, "a row of a matrix is not aligned");
  const auto& rows = emulator::show(from);
  const int lane = emulator::self().number % emulator::kWarp;
  uint32_t words[4] = {};
  for (int which = 0; which < 4; ++which)
    for (int i = 0; i < 2; ++i) {
      const int inner = 2 * (lane % 4) + i, outer = lane / 4;
      const int row = transposed ? inner : outer, column = transposed ? outer : inner;
      uint16_t element = 0;
      std::memcpy(&element,
                  static_cast<const uint16_t*>(
                      emulator::from_shared(uint32_t(rows[size_t(8 * which + row)]), 16)) +
                      column,
                  2);
      words[which] |= uint32_t(element) << (16 * i);
    }
  return {words[0], words[1], words[2], words[3]};
}
inline Matrices ldmatrix(uint32_t from) { return get_rows(from, false); }
inline Matrices ldmatrix_trans(uint32_t from) { return get_rows(from, true); }

inline void st_shared_pair(uint32_t to, float first, float second) {
  const float pair[2] = {first, second};
  std::memcpy(emulator::from_shared(to, 8), pair, 8);
}
inline Pair ld_shared_pair(uint32_t from) {
  Pair pair;
  std::memcpy(&pair, emulator::from_shared(from, 8), 8);
  return pair;
}
inline void st_shared(uint32_t to, uint32_t word) {
  std::memcpy(emulator::from_shared(to, 4), &word, 4);
}
inline void st_shared(uint32_t to, float value) {
  std::memcpy(emulator::from_shared(to, 4), &value, 4);
}
inline float ld_shared_float(uint32_t from) {
  float value;
  std::memcpy(&value, emulator::from_shared(from, 4), 4);
  return value;
}

}  // namespace cadre::cuda
