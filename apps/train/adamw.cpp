#include "apps/train/adamw.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace cadre::train {
namespace {

constexpr int64_t kChunk = 4096;  ///< elements whose squares one thread sums

/// sum(grad^2), by chunks in their order.
double square_norm(const Weight& weight) {
  const float* grad = weight.grad;
  std::vector<double> partial((weight.count + kChunk - 1) / kChunk);
#pragma omp parallel for
  for (int64_t chunk = 0; chunk < static_cast<int64_t>(partial.size()); ++chunk) {
    double sum = 0;
    const int64_t end = std::min(weight.count, (chunk + 1) * kChunk);
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

AdamW::Factors AdamW::factors(bool decays) const {
  const auto t = static_cast<double>(step);
  return {.mean_keep = static_cast<float>(b1),
          .square_keep = static_cast<float>(b2),
          .mean_scale = static_cast<float>(1 / (1 - std::pow(b1, t))),
          .square_scale = static_cast<float>(1 / (1 - std::pow(b2, t))),
          .rate = static_cast<float>(rate),
          .epsilon = static_cast<float>(epsilon),
          .shrink = decays ? static_cast<float>(rate * decay) : 0.0f};
}

float AdamW::clip(double squares) const {
  const double norm = std::sqrt(squares) * grad_scale;
  return static_cast<float>(norm > 1 ? grad_scale / norm : grad_scale);
}

double AdamW::update(std::span<const Weight> weights) const {
  double squares = 0;
  for (const Weight& weight : weights) squares += square_norm(weight);
  const float scale = clip(squares);
  for (const Weight& weight : weights) {
    const Factors f = factors(weight.decays);
    float *w = weight.value, *m = weight.mean, *v = weight.square;
    const float* grad = weight.grad;
#pragma omp parallel for simd
    for (int64_t i = 0; i < weight.count; ++i) {
      f.update(grad[i] * scale, w[i], m[i], v[i]);
    }
  }
  return std::sqrt(squares) * grad_scale;
}

double learning_rate(const Settings& s, int64_t step) {
  const auto at = static_cast<double>(step), steps = static_cast<double>(s.steps);
  const double rise = std::max(1.0, s.warmup * steps);
  if (at <= rise) return s.learning_rate * at / rise;
  const double fall = (at - rise) / (steps - rise + 1);
  return s.learning_rate * (0.05 + 0.475 * (1 + std::cos(std::numbers::pi * fall)));
}

}  // namespace cadre::train
