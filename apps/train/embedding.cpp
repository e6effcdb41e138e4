#include "apps/train/embedding.h"

#include <algorithm>

namespace cadre::train {

template <class T>
void WindowEmbedding<T>::forward(std::span<const T> table, std::span<const uint8_t> bytes,
                                 std::span<T> x) const {
  const int64_t rows = static_cast<int64_t>(bytes.size()) / window;
#pragma omp parallel for
  for (int64_t t = 0; t < rows; ++t) {
    T* out = &x[t * hidden];
    std::fill_n(out, hidden, T(0));
    for (int64_t d = 0; d < window; ++d) {
      const T* entry = &table[(d * 256 + bytes[t * window + d]) * hidden];
      for (int64_t i = 0; i < hidden; ++i) out[i] += entry[i];
    }
  }
}

template <class T>
void WindowEmbedding<T>::backward(std::span<const T> dx, std::span<const uint8_t> bytes,
                                  std::span<T> dtable) const {
  const int64_t rows = static_cast<int64_t>(bytes.size()) / window;
  // A thread owns a distance, so each sum has one writer and one order.
#pragma omp parallel for
  for (int64_t d = 0; d < window; ++d) {
    std::fill_n(&dtable[d * 256 * hidden], 256 * hidden, T(0));
    for (int64_t t = 0; t < rows; ++t) {
      T* entry = &dtable[(d * 256 + bytes[t * window + d]) * hidden];
      for (int64_t i = 0; i < hidden; ++i) entry[i] += dx[t * hidden + i];
    }
  }
}

template struct WindowEmbedding<float>;
template struct WindowEmbedding<double>;

}  // namespace cadre::train
