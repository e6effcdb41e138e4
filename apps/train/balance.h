#pragma once
#include <cstdint>
#include <span>

namespace cadre::train {

/// The load-balancing loss of one block, summed over its T tokens: it is smallest, `weight` per
/// token, where every expert gets the same rows.
///
///   loss = weight * E * sum_e f_e * sum_t score[t, e],   f_e = counts[e] / sum(counts)
///
/// f has no gradient, since the choice has none: dscore[t, e] = weight * E * f_e.
///
/// Shapes    counts [E]   score [T, E]
template <class T>
T balance_loss(T weight, std::span<const int64_t> counts, std::span<const T> score);

/// Its gradient. Shapes    counts [E]   dscore [T, E]
template <class T>
void balance_gradient(T weight, std::span<const int64_t> counts, std::span<T> dscore);

extern template double balance_loss(double, std::span<const int64_t>, std::span<const double>);
extern template void balance_gradient(float, std::span<const int64_t>, std::span<float>);
extern template void balance_gradient(double, std::span<const int64_t>, std::span<double>);

}  // namespace cadre::train
