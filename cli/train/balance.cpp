#include "cli/train/balance.h"

namespace cadre::train {

template <class T>
T balance_loss(T weight, std::span<const int64_t> counts, std::span<const T> score,
               std::span<T> dscore) {
  int64_t routed = 0;
  for (const int64_t count : counts) routed += count;
  const size_t experts = counts.size(), tokens = score.size() / experts;
  T loss = 0;
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t e = 0; e < experts; ++e) {
      const T share = static_cast<T>(counts[e]) / static_cast<T>(routed);
      dscore[t * experts + e] = weight * static_cast<T>(experts) * share;
      loss += dscore[t * experts + e] * score[t * experts + e];
    }
  }
  return loss;
}

template float balance_loss(float, std::span<const int64_t>, std::span<const float>,
                            std::span<float>);
template double balance_loss(double, std::span<const int64_t>, std::span<const double>,
                             std::span<double>);

}  // namespace cadre::train
