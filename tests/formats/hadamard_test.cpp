// The Hadamard transform: its matrix, orthonormal, and that a product does not change under it.
#include "formats/hadamard.h"

#include <gtest/gtest.h>

#include <bit>
#include <random>
#include <vector>

using namespace cadre::formats;

namespace {

constexpr int kSigns[16] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};

/// Entry of diag(signs) * H16 / 4.
double entry(int i, int j) {
  return kSigns[i] * (std::popcount(unsigned(i & j)) % 2 ? -0.25 : 0.25);
}

TEST(Hadamard, UnitVectorsGiveTheRowsOfItsMatrix) {
  for (int i = 0; i < 16; ++i) {
    float v[16] = {};
    v[i] = 1;
    Hadamard16::apply(v);
    for (int j = 0; j < 16; ++j) EXPECT_EQ(v[j], entry(i, j)) << i << ", " << j;
  }
}

TEST(Hadamard, MatrixIsOrthonormal) {
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 16; ++k) {
      double dot = 0;
      for (int j = 0; j < 16; ++j) dot += entry(i, j) * entry(k, j);
      EXPECT_EQ(dot, i == k ? 1 : 0);
    }
}

TEST(Hadamard, KeepsAProductOfIntegersExactly) {
  // Small integers: every sum is exact and every result a bf16 number, so nothing may be lost.
  std::mt19937 random(5);
  for (int trial = 0; trial < 1000; ++trial) {
    float a[16], b[16];
    double want = 0, got = 0;
    for (int i = 0; i < 16; ++i) {
      a[i] = float(int(random() % 9) - 4);
      b[i] = float(int(random() % 9) - 4);
      want += a[i] * b[i];
    }
    Hadamard16::apply(a);
    Hadamard16::apply(b);
    for (int i = 0; i < 16; ++i) got += double(a[i]) * b[i];
    ASSERT_EQ(got, want);
  }
}

TEST(Hadamard, RoundsTheTransformOfAnyValuesToBf16) {
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  for (int trial = 0; trial < 1000; ++trial) {
    float v[16], x[16];
    double size = 0;
    for (int i = 0; i < 16; ++i) size += std::abs(x[i] = v[i] = normal(random));
    Hadamard16::apply(v);
    for (int j = 0; j < 16; ++j) {
      double want = 0;
      for (int i = 0; i < 16; ++i) want += x[i] * entry(i, j);
      // Four fp32 roundings of sums no larger than `size`, then half a step of bf16.
      ASSERT_NEAR(v[j], want, std::abs(want) * 0x1p-8 + size * 0x1p-21);
      ASSERT_TRUE(Bf16::holds(v[j]));
    }
  }
}

/// The first result for three signed terms: 2^24 at 0, `near` and `far` at two distances.
float first_of(int near_distance, float near, int far_distance, float far) {
  float v[16] = {};
  v[0] = 0x1p24f;
  v[near_distance] = near * float(kSigns[near_distance]);
  v[far_distance] = far * float(kSigns[far_distance]);
  Hadamard16::apply(v);
  return v[0];
}

TEST(Hadamard, AddsNearNeighboursBeforeFarOnes) {
  // 2^24 + 1 is 2^24 in fp32: whether the 1 survives tells which two terms met first.
  for (const int near : {1, 2, 4})
    for (int far = 2 * near; far < 16; far *= 2) {
      EXPECT_EQ(first_of(near, -0x1p24f, far, 1), 0.25f) << near << ", " << far;
      EXPECT_EQ(first_of(near, 1, far, -0x1p24f), 0) << near << ", " << far;
    }
}

}  // namespace
