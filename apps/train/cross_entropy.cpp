#include "apps/train/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace cadre::train {

template <class T>
double cross_entropy(std::span<T> logits, std::span<const uint8_t> target) {
  const auto rows = static_cast<int64_t>(target.size());
  std::vector<double> loss(target.size());
#pragma omp parallel for
  for (int64_t t = 0; t < rows; ++t) {
    T* row = &logits[t * kSymbols];
    const T largest = *std::max_element(row, row + kSymbols);
    const T wanted = row[target[t]] - largest;
    T sum = 0;
    for (int64_t i = 0; i < kSymbols; ++i) sum += row[i] = std::exp(row[i] - largest);
    for (int64_t i = 0; i < kSymbols; ++i) row[i] /= sum;
    row[target[t]] -= T(1);
    loss[t] = std::log(static_cast<double>(sum)) - static_cast<double>(wanted);
  }
  double total = 0;
  for (const double each : loss) total += each;
  return total;
}

template double cross_entropy(std::span<float>, std::span<const uint8_t>);
template double cross_entropy(std::span<double>, std::span<const uint8_t>);

}  // namespace cadre::train
