#pragma once
#include <cstdint>
#include <cstring>

#include "cuda/device/matrices.h"

// The words of src/cuda/device/mma.h in plain C++.
namespace cadre::cuda {

struct Columns8 {
  uint32_t low, high;
};

/// What the lanes of a warp show each other for a product.
struct ProductPart {
  Matrices a;
  Columns8 b;
};

template <class Element>
inline void multiply_warp(float (&sums)[4], const Matrices& a, const Columns8& b) {
  const ProductPart mine{a, b};
  const auto& shown = emulator::show(reinterpret_cast<uintptr_t>(&mine));
  const int lane = emulator::self().number % emulator::kWarp;
  const auto part = [&](int of) {
    return reinterpret_cast<const ProductPart*>(uintptr_t(shown[size_t(of)]));
  };
  const auto element = [](uint32_t word, int which) {
    return Element::decode(uint16_t(word >> (16 * which)));
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, column = 2 * (lane % 4) + i % 2;
    for (int deep = 0; deep < 16; ++deep) {
      const Matrices& left = part(4 * row + deep % 8 / 2)->a;
      const Columns8& right = part(4 * column + deep % 8 / 2)->b;
      const uint32_t of_a = deep < 8 ? (i < 2 ? left.a : left.b) : (i < 2 ? left.c : left.d);
      sums[i] += element(of_a, deep % 2) * element(deep < 8 ? right.low : right.high, deep % 2);
    }
  }
  emulator::show(0);  // `mine` is read until here
}

inline void multiply_bf16(float (&sums)[4], const Matrices& a, const Columns8& b) {
  multiply_warp<formats::Bf16>(sums, a, b);
}
inline void multiply_f16(float (&sums)[4], const Matrices& a, const Columns8& b) {
  multiply_warp<formats::Fp16>(sums, a, b);
}

}  // namespace cadre::cuda
