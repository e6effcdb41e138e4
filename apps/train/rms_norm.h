#pragma once
#include <cstdint>
#include <span>

namespace cadre::train {

/// Scales every row to a root mean square of 1, then every column by its gain:
///
///   rstd[t] = 1 / sqrt(mean_i x[t, i]^2 + 1e-6),   u[t, i] = x[t, i] * rstd[t] * gain[i]
///
/// Shapes    x, u [T, H]   gain [H]   rstd [T]
/// Types     T is float; double for the gradient test.
template <class T>
struct RmsNorm {
  std::span<const T> x, gain;
  std::span<T> rstd;  ///< written by forward, read by backward

  void forward(std::span<T> u) const;
  /// dx[t, i] += rstd[t] * (gain[i] du[t, i] - x[t, i] rstd[t]^2 mean_j(gain[j] du[t, j] x[t, j]))
  /// dgain[i] = sum_t du[t, i] x[t, i] rstd[t], summed in an order that no thread count changes.
  void backward(std::span<const T> du, std::span<T> dx, std::span<T> dgain) const;
};

extern template struct RmsNorm<float>;
extern template struct RmsNorm<double>;

}  // namespace cadre::train
