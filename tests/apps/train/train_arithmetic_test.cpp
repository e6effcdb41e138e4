// Norm, embedding, loss, balance and optimizer: gradients against differences in double, the float
// versions against the double ones, and equal bits for any number of threads.
#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>

#include "apps/train/adamw.h"
#include "apps/train/balance.h"
#include "apps/train/bf16.h"
#include "apps/train/cast.h"
#include "apps/train/cross_entropy.h"
#include "apps/train/embedding.h"
#include "apps/train/rms_norm.h"
#include "tests/apps/train/differences.h"

using namespace cadre;
using namespace cadre::train;
using cadre::test::expect_gradient;
using cadre::test::normals;

namespace {

template <class T>
std::vector<double> widened(const std::vector<T>& values) {
  return {values.begin(), values.end()};
}

template <class T>
std::vector<T> narrowed(const std::vector<double>& values) {
  std::vector<T> out;
  for (const double v : values) out.push_back(static_cast<T>(v));
  return out;
}

double dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// What the work computes with one thread and with three; both must have the same bits.
template <class Work>
void expect_same_for_any_threads(Work&& work) {
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  const auto one = work();
  omp_set_num_threads(3);
  const auto three = work();
  omp_set_num_threads(threads);
  EXPECT_EQ(one, three);
}

constexpr int64_t kRows = 131, kWidth = 24;

}  // namespace

TEST(RmsNorm, HasTheGradientOfDifferences) {
  constexpr size_t rows = 5, width = 7;
  std::vector<double> x = normals(rows * width, 1), gain = normals(width, 2), rstd(rows);
  const std::vector<double> du = normals(rows * width, 3);
  std::vector<double> u(rows * width), dx(rows * width), dgain(width);
  const RmsNorm<double> norm{x, gain, rstd};
  const auto loss = [&] {
    norm.forward(u);
    return dot(u, du);
  };
  loss();
  norm.backward(du, dx, dgain);
  expect_gradient(loss, x, dx);
  expect_gradient(loss, gain, dgain);
}

TEST(RmsNorm, AddsToItsInputGradient) {
  std::vector<double> x = normals(14, 1), gain = normals(7, 2), rstd(2), u(14), dgain(7);
  const std::vector<double> du = normals(14, 3);
  const RmsNorm<double> norm{x, gain, rstd};
  norm.forward(u);
  std::vector<double> from_zero(14, 0.0), from_ten(14, 10.0);
  norm.backward(du, from_zero, dgain);
  norm.backward(du, from_ten, dgain);
  for (size_t i = 0; i < 14; ++i) EXPECT_NEAR(from_ten[i] - 10, from_zero[i], 1e-12);
}

TEST(RmsNorm, InFloatIsThatInDouble) {
  const std::vector<double> x = normals(kRows * kWidth, 4), gain = normals(kWidth, 5);
  const std::vector<double> du = normals(kRows * kWidth, 6);
  std::vector<double> rstd(kRows), u(x.size()), dx(x.size()), dgain(kWidth);
  const RmsNorm<double> want{x, gain, rstd};
  want.forward(u);
  want.backward(du, dx, dgain);
  const auto xf = narrowed<float>(x), gainf = narrowed<float>(gain), duf = narrowed<float>(du);
  std::vector<float> rstdf(kRows), uf(x.size()), dxf(x.size()), dgainf(kWidth);
  const RmsNorm<float> got{xf, gainf, rstdf};
  got.forward(uf);
  got.backward(duf, dxf, dgainf);
  // Sums of `width` or `rows` terms of size one, each rounded once: gamma of their number.
  for (size_t i = 0; i < u.size(); ++i) {
    EXPECT_NEAR(uf[i], u[i], 60 * 0x1p-24 * (1 + std::abs(u[i])));
    EXPECT_NEAR(dxf[i], dx[i], 60 * 0x1p-24 * 20);
  }
  for (size_t i = 0; i < dgain.size(); ++i)
    EXPECT_NEAR(dgainf[i], dgain[i], 2 * kRows * 0x1p-24 * kRows);
}

TEST(RmsNorm, HasTheSameBitsForAnyThreads) {
  const auto x = normals<float>(kRows * kWidth, 7), gain = normals<float>(kWidth, 8);
  const auto du = normals<float>(kRows * kWidth, 9);
  expect_same_for_any_threads([&] {
    std::vector<float> rstd(kRows), u(x.size()), dx(x.size()), dgain(kWidth);
    const RmsNorm<float> norm{x, gain, rstd};
    norm.forward(u);
    norm.backward(du, dx, dgain);
    return std::tuple(u, dx, dgain);
  });
}

TEST(WindowEmbedding, SumsOneVectorPerDistance) {
  constexpr int64_t window = 3, hidden = 4;
  const std::vector<double> table = normals(window * 256 * hidden, 1);
  const std::vector<uint8_t> bytes = {7, 0, 255, 7, 7, 9};
  std::vector<double> x(2 * hidden, 99.0);
  WindowEmbedding<double>{window, hidden}.forward(table, bytes, x);
  for (int64_t t = 0; t < 2; ++t) {
    for (int64_t i = 0; i < hidden; ++i) {
      double want = 0;
      for (int64_t d = 0; d < window; ++d) {
        want += table[(d * 256 + bytes[t * window + d]) * hidden + i];
      }
      EXPECT_EQ(x[t * hidden + i], want);
    }
  }
}

TEST(WindowEmbedding, HasTheGradientOfDifferences) {
  constexpr int64_t window = 3, hidden = 2;
  std::vector<double> table = normals(window * 256 * hidden, 2);
  const std::vector<uint8_t> bytes = {1, 2, 3, 1, 9, 9, 1, 2, 255};
  const std::vector<double> dx = normals(3 * hidden, 3);
  const WindowEmbedding<double> embedding{window, hidden};
  std::vector<double> x(3 * hidden), dtable(table.size(), 99.0);
  embedding.backward(dx, bytes, dtable);
  expect_gradient(
      [&] {
        embedding.forward(table, bytes, x);
        return dot(x, dx);
      },
      table, dtable);
}

TEST(WindowEmbedding, HasTheSameBitsForAnyThreads) {
  constexpr int64_t window = 5, hidden = 8, rows = 300;
  const auto table = normals<float>(window * 256 * hidden, 4),
             dx = normals<float>(rows * hidden, 5);
  std::vector<uint8_t> bytes;
  for (uint64_t i = 0; i < rows * window; ++i) bytes.push_back(uint8_t(random_word({1, 2, i}) % 7));
  expect_same_for_any_threads([&] {
    const WindowEmbedding<float> embedding{window, hidden};
    std::vector<float> x(rows * hidden), dtable(table.size());
    embedding.forward(table, bytes, x);
    embedding.backward(dx, bytes, dtable);
    return std::pair(x, dtable);
  });
}

TEST(CrossEntropy, HasTheGradientOfDifferencesAndTheValueOfTheFormula) {
  const std::vector<uint8_t> target = {3, 255, 0};
  std::vector<double> logits = normals(3 * 256, 1);
  for (double& l : logits) l *= 4;
  const auto loss = [&] {
    std::vector<double> copy = logits;
    return cross_entropy<double>(copy, target);
  };
  std::vector<double> gradient = logits;
  const double got = cross_entropy<double>(gradient, target);
  double want = 0;
  for (size_t t = 0; t < 3; ++t) {
    double sum = 0;
    for (size_t i = 0; i < 256; ++i) sum += std::exp(logits[t * 256 + i]);
    want += std::log(sum) - logits[t * 256 + target[t]];
  }
  EXPECT_NEAR(got, want, 1e-12 * want);
  expect_gradient(loss, logits, gradient);
}

TEST(CrossEntropy, SurvivesHugeScores) {
  std::vector<float> logits(256, -1e30f);
  logits[5] = 1e30f;
  const std::vector<uint8_t> right = {5};
  EXPECT_EQ(cross_entropy<float>(logits, right), 0);
  EXPECT_EQ(logits[5], 0);
  const std::vector<uint8_t> even = {9};
  std::vector<float> level(256, 1e30f);
  EXPECT_NEAR(cross_entropy<float>(level, even), std::log(256.0), 1e-6);
}

TEST(Balance, HasTheGradientOfDifferences) {
  const std::vector<int64_t> counts = {5, 0, 3};
  std::vector<double> score = normals(4 * 3, 1), dscore(4 * 3);
  balance_gradient<double>(0.3, counts, dscore);
  expect_gradient([&] { return balance_loss<double>(0.3, counts, score); }, score, dscore);
}

TEST(Balance, IsTheWeightPerTokenWhereTheLoadIsEven) {
  const std::vector<int64_t> even = {2, 2, 2, 2}, one = {8, 0, 0, 0};
  const std::vector<double> score = {.25, .25, .25, .25, .4, .3, .2, .1};
  EXPECT_NEAR(balance_loss<double>(0.3, even, score), 2 * 0.3, 1e-12);
  EXPECT_GT(balance_loss<double>(0.3, one, score), 2 * 0.3);
}

TEST(AdamW, IsItsFormulaInDouble) {
  Settings settings;
  std::vector<Parameter> got(2);
  got[0] = {
      "w", {5, 3}, true, normals<float>(15, 1), std::vector<float>(15), std::vector<float>(15)};
  got[1] = {"g", {4}, false, normals<float>(4, 2), std::vector<float>(4), std::vector<float>(4)};
  const std::unique_ptr<Engine> cpu = open_engine(this_cpu());
  const Weights weights(*cpu, got);
  std::vector<std::vector<double>> w, m, v;
  for (const Parameter& p : got) {
    w.push_back(widened(p.value));
    m.emplace_back(p.value.size(), 0.0);
    v.emplace_back(p.value.size(), 0.0);
  }
  for (int64_t step = 1; step <= 5; ++step) {
    double squares = 0;
    for (size_t i = 0; i < 2; ++i) {
      std::vector<float> grad = normals<float>(got[i].value.size(), 10 + 2 * step + i);
      for (float& g : grad) g *= step % 2 ? 100.0f : 0.1f;  // clipped and not clipped
      for (const float g : grad) squares += double(g) * double(g);
      std::ranges::copy(grad, weights.list()[i].grad);
    }
    const double norm = 0.25 * std::sqrt(squares), scale = 0.25 / std::max(1.0, norm);
    AdamW adamw{1e-2, 0.1, 0.25, step};
    EXPECT_NEAR(adamw.update(weights.list()), norm, 1e-9 * norm);
    for (size_t i = 0; i < 2; ++i) {
      for (size_t j = 0; j < w[i].size(); ++j) {
        const double g = scale * double(weights.list()[i].grad[j]);
        m[i][j] = 0.9 * m[i][j] + 0.1 * g;
        v[i][j] = 0.98 * v[i][j] + 0.02 * g * g;
        const double t = double(step);
        const double direction = m[i][j] / (1 - std::pow(0.9, t)) /
                                 (std::sqrt(v[i][j] / (1 - std::pow(0.98, t))) + 1e-8);
        w[i][j] -= 1e-2 * (direction + (i == 0 ? 0.1 * w[i][j] : 0));
        EXPECT_NEAR(got[i].value[j], w[i][j], 1e-6) << step << ' ' << i << ' ' << j;
      }
    }
  }
}

TEST(AdamW, HasTheSameBitsForAnyThreads) {
  expect_same_for_any_threads([&] {
    std::vector<Parameter> p(1);
    p[0] = {"w",
            {9999, 1},
            true,
            normals<float>(9999, 1),
            normals<float>(9999, 3),
            std::vector<float>(9999, 0.5f)};
    const std::unique_ptr<Engine> cpu = open_engine(this_cpu());
    const Weights weights(*cpu, p);
    std::ranges::copy(normals<float>(9999, 2), weights.list()[0].grad);
    const double norm = AdamW{1e-2, 0.1, 1.0, 3}.update(weights.list());
    return std::tuple(norm, p[0].value, p[0].mean, p[0].square);
  });
}

TEST(LearningRate, RisesAndFalls) {
  Settings s;
  s.steps = 100;
  s.warmup = 0.1;
  EXPECT_NEAR(learning_rate(s, 1), s.learning_rate / 10, 1e-9);
  EXPECT_NEAR(learning_rate(s, 10), s.learning_rate, 1e-9);
  for (int64_t step = 11; step <= 100; ++step) {
    EXPECT_LT(learning_rate(s, step), learning_rate(s, step - 1));
  }
  EXPECT_GT(learning_rate(s, 100), 0.04 * s.learning_rate);
  s.steps = 1;
  EXPECT_EQ(learning_rate(s, 1), s.learning_rate);
}

TEST(Cast, RoundsToNearestEven) {
  EXPECT_EQ(to_bf16(1.0f), 0x3F80);
  EXPECT_EQ(to_bf16(1.0f + 0x1p-8f), 0x3F80);             // a tie: to even
  EXPECT_EQ(to_bf16(1.0f + 3 * 0x1p-8f), 0x3F82);         // a tie: to even
  EXPECT_EQ(to_bf16(1.0f + 0x1p-8f + 0x1p-20f), 0x3F81);  // above the tie
  EXPECT_TRUE(std::isnan(from_bf16(to_bf16(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_TRUE(std::isinf(from_bf16(to_bf16(std::numeric_limits<float>::infinity()))));
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const float value = from_bf16(static_cast<uint16_t>(code));
    if (std::isnan(value)) continue;
    EXPECT_EQ(to_bf16(value), code);
  }
}

TEST(Cast, StoresAndAdds) {
  const std::vector<float> values = {1.5f, -3.0f, 1.0f + 0x1p-10f};
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const std::unique_ptr<Engine> cpu = open_engine(this_cpu());
    const Cast cast(*cpu, dtype, 3);
    cast.store(values.data());
    std::vector<float> sum = {1, 1, 1};
    cast.add_to(sum.data());
    EXPECT_EQ(sum[0], 2.5f);
    EXPECT_EQ(sum[1], -2.0f);
    EXPECT_EQ(sum[2], dtype == DType::kF32 ? 2.0f + 0x1p-10f : 2.0f);
  }
}
