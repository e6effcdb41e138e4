#include "apps/train/balance.h"

#include <vector>

namespace cadre::train {

template <class T>
T balance_loss(T weight, std::span<const int64_t> counts, std::span<const T> score) {
  std::vector<T> dscore(score.size());
  balance_gradient<T>(weight, counts, dscore);
  T loss = 0;
  for (size_t i = 0; i < score.size(); ++i) loss += dscore[i] * score[i];
  return loss;
}

template <class T>
void balance_gradient(T weight, std::span<const int64_t> counts, std::span<T> dscore) {
  int64_t routed = 0;
  for (const int64_t count : counts) routed += count;
  const size_t experts = counts.size();
  for (size_t i = 0; i < dscore.size(); ++i) {
    const T share = static_cast<T>(counts[i % experts]) / static_cast<T>(routed);
    dscore[i] = weight * static_cast<T>(experts) * share;
  }
}

template double balance_loss(double, std::span<const int64_t>, std::span<const double>);
template void balance_gradient(float, std::span<const int64_t>, std::span<float>);
template void balance_gradient(double, std::span<const int64_t>, std::span<double>);

}  // namespace cadre::train
