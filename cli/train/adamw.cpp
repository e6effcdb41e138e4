#include "cli/train/adamw.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace cadre::train {
namespace {

constexpr int64_t kChunk = 4096;  ///< elements whose squares one thread sums

/// sum(grad^2), by chunks in their order.
double square_norm(const std::vector<float>& grad) {
  const auto count = static_cast<int64_t>(grad.size());
  std::vector<double> partial((count + kChunk - 1) / kChunk);
#pragma omp parallel for
  for (int64_t chunk = 0; chunk < static_cast<int64_t>(partial.size()); ++chunk) {
    double sum = 0;
    const int64_t end = std::min(count, (chunk + 1) * kChunk);
#pragma omp simd reduction(+ : sum)
    for (int64_t i = chunk * kChunk; i < end; ++i) {
      sum += static_cast<double>(grad[i]) * static_cast<double>(grad[i]);
    }
    partial[chunk] = sum;
  }
  double total = 0;
  for (const double sum : partial) total += sum;
  return total;
}

}  // namespace

double AdamW::update(std::span<Parameter> parameters) const {
  double squares = 0;
  for (const Parameter& p : parameters) squares += square_norm(p.grad);
  const double norm = std::sqrt(squares) * grad_scale;
  const auto scale = static_cast<float>(norm > 1 ? grad_scale / norm : grad_scale);
  const auto mean_keep = static_cast<float>(b1), square_keep = static_cast<float>(b2);
  const auto t = static_cast<double>(step);
  const auto mean_scale = static_cast<float>(1 / (1 - std::pow(b1, t)));
  const auto square_scale = static_cast<float>(1 / (1 - std::pow(b2, t)));
  const auto lr = static_cast<float>(rate), tiny = static_cast<float>(epsilon);
  for (Parameter& p : parameters) {
    const float shrink = p.decays ? static_cast<float>(rate * decay) : 0.0f;
    float *w = p.value.data(), *m = p.mean.data(), *v = p.square.data();
    const float* grad = p.grad.data();
    const auto count = static_cast<int64_t>(p.value.size());
#pragma omp parallel for simd
    for (int64_t i = 0; i < count; ++i) {
      const float g = grad[i] * scale;
      m[i] = mean_keep * m[i] + (1 - mean_keep) * g;
      v[i] = square_keep * v[i] + (1 - square_keep) * g * g;
      const float direction = (m[i] * mean_scale) / (std::sqrt(v[i] * square_scale) + tiny);
      w[i] -= lr * direction + shrink * w[i];
    }
  }
  return norm;
}

double learning_rate(const Settings& s, int64_t step) {
  const auto at = static_cast<double>(step), steps = static_cast<double>(s.steps);
  const double rise = std::max(1.0, s.warmup * steps);
  if (at <= rise) return s.learning_rate * at / rise;
  const double fall = (at - rise) / (steps - rise + 1);
  return s.learning_rate * (0.05 + 0.475 * (1 + std::cos(std::numbers::pi * fall)));
}

}  // namespace cadre::train
