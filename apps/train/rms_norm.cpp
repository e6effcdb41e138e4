#include "apps/train/rms_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace cadre::train {
namespace {

constexpr int64_t kChunk = 64;  ///< rows whose gain gradients are summed by one thread
constexpr double kEpsilon = 1e-6;

}  // namespace

template <class T>
void RmsNorm<T>::forward(std::span<T> u) const {
  const auto rows = static_cast<int64_t>(rstd.size()), width = static_cast<int64_t>(gain.size());
#pragma omp parallel for
  for (int64_t t = 0; t < rows; ++t) {
    const T* in = &x[t * width];
    T squares = 0;
    for (int64_t i = 0; i < width; ++i) squares += in[i] * in[i];
    rstd[t] = T(1) / std::sqrt(squares / static_cast<T>(width) + static_cast<T>(kEpsilon));
    for (int64_t i = 0; i < width; ++i) u[t * width + i] = in[i] * rstd[t] * gain[i];
  }
}

template <class T>
void RmsNorm<T>::backward(std::span<const T> du, std::span<T> dx, std::span<T> dgain) const {
  const auto rows = static_cast<int64_t>(rstd.size()), width = static_cast<int64_t>(gain.size());
  const int64_t chunks = (rows + kChunk - 1) / kChunk;
  std::vector<T> partial(chunks * width, T(0));
#pragma omp parallel for
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    T* sums = &partial[chunk * width];
    for (int64_t t = chunk * kChunk; t < std::min(rows, (chunk + 1) * kChunk); ++t) {
      const T *in = &x[t * width], *grad = &du[t * width];
      const T r = rstd[t];
      T dot = 0;
      for (int64_t i = 0; i < width; ++i) {
        dot += grad[i] * gain[i] * in[i];
        sums[i] += grad[i] * in[i] * r;
      }
      dot *= r * r * r / static_cast<T>(width);
      for (int64_t i = 0; i < width; ++i) {
        dx[t * width + i] += grad[i] * gain[i] * r - dot * in[i];
      }
    }
  }
  for (int64_t i = 0; i < width; ++i) {
    T sum = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += partial[chunk * width + i];
    dgain[i] = sum;
  }
}

template struct RmsNorm<float>;
template struct RmsNorm<double>;

}  // namespace cadre::train
