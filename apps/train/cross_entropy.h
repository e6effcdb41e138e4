#pragma once
#include <cstdint>
#include <span>

namespace cadre::train {

/// Classes of the head: one for each byte.
inline constexpr int64_t kSymbols = 256;

/// Sum over the rows of -log softmax(logits[t, :])[target[t]], in nats; the logits are replaced by
/// the gradient of that sum, softmax(logits[t, :])[i] - (i == target[t]).
///
/// Shapes    logits [T, 256]   target [T]
template <class T>
double cross_entropy(std::span<T> logits, std::span<const uint8_t> target);

extern template double cross_entropy(std::span<float>, std::span<const uint8_t>);
extern template double cross_entropy(std::span<double>, std::span<const uint8_t>);

}  // namespace cadre::train
