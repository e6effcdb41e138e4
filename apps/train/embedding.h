#pragma once
#include <cstdint>
#include <span>

namespace cadre::train {

/// A window of previous bytes as a vector: every distance has its own vector for every byte, and
/// they are summed. This is an embedding of each byte and one linear map of the whole window,
/// multiplied out.
///
///   x[t, :] = sum_d table[d, window[t, d], :]
///
/// Shapes    table [W, 256, H]   window [T, W], nearest byte first   x [T, H]
template <class T>
struct WindowEmbedding {
  int64_t window = 0;  ///< W
  int64_t hidden = 0;  ///< H

  void forward(std::span<const T> table, std::span<const uint8_t> bytes, std::span<T> x) const;
  /// dtable[d, b, :] = sum of dx[t, :] over the rows with window[t, d] = b, in the order of rows.
  void backward(std::span<const T> dx, std::span<const uint8_t> bytes, std::span<T> dtable) const;
};

extern template struct WindowEmbedding<float>;
extern template struct WindowEmbedding<double>;

}  // namespace cadre::train
