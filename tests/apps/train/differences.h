#pragma once
#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <functional>
#include <span>
#include <vector>

#include "apps/train/random.h"

namespace cadre::test {

/// Normals from a stream of their own.
template <class T = double>
std::vector<T> normals(size_t count, uint64_t stream) {
  std::vector<T> values(count);
  for (size_t i = 0; i < count; ++i) {
    values[i] = static_cast<T>(train::random_normal({2024, stream, i}));
  }
  return values;
}

/// Expects `gradient` to be that of `loss` by central differences at every element of `at`. The
/// quotient is off by the step's square, and by 1e-16 / step for rounding. One thread: the losses
/// are tiny.
inline void expect_gradient(const std::function<double()>& loss, std::span<double> at,
                            std::span<const double> gradient) {
  constexpr double kStep = 1e-5;
  ASSERT_EQ(at.size(), gradient.size());
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  double largest = 0;
  for (const double g : gradient) largest = std::max(largest, std::abs(g));
  ASSERT_GT(largest, 0);
  for (size_t i = 0; i < at.size(); ++i) {
    const double kept = at[i];
    at[i] = kept + kStep;
    const double up = loss();
    at[i] = kept - kStep;
    const double down = loss();
    at[i] = kept;
    EXPECT_NEAR((up - down) / (2 * kStep), gradient[i], 1e-7 * (largest + std::abs(up))) << i;
  }
  omp_set_num_threads(threads);
}

}  // namespace cadre::test
