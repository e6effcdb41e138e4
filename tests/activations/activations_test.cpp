// One element of every activation: the formula written a second time, gradients against
// differences, and the corners.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <set>

#include "activations/glu_layout.h"
#include "activations/list.h"

using namespace cadre;
using activations::All;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
const ActivationConstants kConstants{.limit = 2.5f, .alpha = 1.25f, .offset = 0.5f};

double forward(ActivationKind kind, double gate, double up) {
  double h = kNan;
  All::visit(kind, [&]<class Row>(Row) { h = Row::forward(gate, up, kConstants); });
  return h;
}

template <class Real>
activations::Gradient<Real> backward(ActivationKind kind, Real gate, Real up, Real dh) {
  activations::Gradient<Real> gradient{};
  All::visit(kind, [&]<class Row>(Row) { gradient = Row::backward(gate, up, dh, kConstants); });
  return gradient;
}

/// The definitions, as in the header's list, by the standard library's functions.
double definition(ActivationKind kind, double x, double up) {
  const double pi = std::acos(-1.0), silu = x / (1 + std::exp(-x));
  const double gelu = x / 2 * std::erfc(-x / std::sqrt(2.0));
  const double gelu_tanh = x / 2 * (1 + std::tanh(std::sqrt(2 / pi) * (x + 0.044715 * x * x * x)));
  const double relu = std::fmax(x, 0), limit = kConstants.limit;
  const double g = std::fmin(x, limit), u = std::fmax(std::fmin(up, limit), -limit);
  switch (kind) {
    case ActivationKind::kSwiGlu:
      return silu * up;
    case ActivationKind::kGeGlu:
      return gelu * up;
    case ActivationKind::kGeGluTanh:
      return gelu_tanh * up;
    case ActivationKind::kReGlu:
      return relu * up;
    case ActivationKind::kClampedSwiGlu:
      return g / (1 + std::exp(-kConstants.alpha * g)) * (u + kConstants.offset);
    case ActivationKind::kSilu:
      return silu;
    case ActivationKind::kGelu:
      return gelu;
    case ActivationKind::kGeluTanh:
      return gelu_tanh;
    case ActivationKind::kRelu:
      return relu;
    case ActivationKind::kReluSquared:
      return relu * relu;
  }
  return kNan;
}

struct EveryActivation : testing::TestWithParam<ActivationInfo> {
  const ActivationKind kind = GetParam().kind;
};

TEST_P(EveryActivation, ForwardIsItsDefinition) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> uniform(-6, 6);
  for (int i = 0; i < 2000; ++i) {
    const double gate = uniform(random), up = uniform(random), want = definition(kind, gate, up);
    // 1 + tanh(u) of the definition loses digits where it is small, so the bound is absolute.
    EXPECT_NEAR(forward(kind, gate, up), want, 1e-14 * (1 + std::abs(gate * up))) << gate;
    EXPECT_EQ(backward<double>(kind, gate, up, 1).value, forward(kind, gate, up));
  }
}

TEST_P(EveryActivation, BackwardIsTheLimitOfDifferences) {
  std::mt19937 random(2);
  std::uniform_real_distribution<double> uniform(-4, 4);
  const double step = 1e-5;
  for (int i = 0; i < 2000; ++i) {
    const double gate = uniform(random), up = uniform(random), dh = uniform(random);
    const auto got = backward(kind, gate, up, dh);
    const auto near = [&](double x, double kink) { return std::abs(x - kink) < 2 * step; };
    if (near(gate, 0) || near(gate, kConstants.limit) || near(std::abs(up), kConstants.limit))
      continue;  // differences across a kink mean nothing
    const double dgate =
        (forward(kind, gate + step, up) - forward(kind, gate - step, up)) / (2 * step);
    const double dup =
        (forward(kind, gate, up + step) - forward(kind, gate, up - step)) / (2 * step);
    EXPECT_NEAR(got.dgate, dh * dgate, 1e-7) << gate << " " << up;
    EXPECT_NEAR(got.dup, dh * dup, 1e-7) << gate << " " << up;
  }
}

TEST_P(EveryActivation, NanStaysNanAndLargeNumbersDoNotBecomeOne) {
  EXPECT_TRUE(std::isnan(forward(kind, kNan, 1)));
  EXPECT_TRUE(std::isnan(backward<double>(kind, kNan, 1, 1).value));
  EXPECT_EQ(std::isnan(forward(kind, 1, kNan)), GetParam().gated);
  for (float gate : {-3e38f, -1e13f, -200.0f, -90.0f, 90.0f, 200.0f, 1e13f, 3e38f}) {
    const auto got = backward<float>(kind, gate, 0.5f, 1.0f);
    EXPECT_FALSE(std::isnan(got.value)) << gate;
    EXPECT_FALSE(std::isnan(got.dgate)) << gate;
    EXPECT_FALSE(std::isnan(got.dup)) << gate;
    if (gate < 0) {
      EXPECT_NEAR(got.value, 0, 1e-20) << gate;
      EXPECT_NEAR(got.dgate, 0, 1e-20) << gate;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(List, EveryActivation, testing::ValuesIn(All::kInfo),
                         [](const auto& given) { return std::string(given.param.name); });

TEST(ClampedSwiGlu, KeepsTheGradientAtTheLimitAndCutsItBeyond) {
  const auto kind = ActivationKind::kClampedSwiGlu;
  const double limit = kConstants.limit, beyond = std::nextafter(limit, 9);
  EXPECT_NE(backward<double>(kind, limit, 1, 1).dgate, 0);
  EXPECT_EQ(backward<double>(kind, beyond, 1, 1).dgate, 0);
  EXPECT_NE(backward<double>(kind, -beyond, 1, 1).dgate, 0) << "the gate is cut above only";
  for (double sign : {-1.0, 1.0}) {
    EXPECT_NE(backward<double>(kind, 1, sign * limit, 1).dup, 0);
    EXPECT_EQ(backward<double>(kind, 1, sign * beyond, 1).dup, 0);
    EXPECT_EQ(forward(kind, 1, sign * beyond), forward(kind, 1, sign * limit));
  }
}

TEST(Relu, HasNoGradientAtZero) {
  EXPECT_EQ(backward<double>(ActivationKind::kRelu, 0, 0, 1).dgate, 0);
  EXPECT_EQ(backward<double>(ActivationKind::kReluSquared, 0, 0, 1).dgate, 0);
  EXPECT_EQ(backward<double>(ActivationKind::kReGlu, 0, 3, 1).dgate, 0);
}

TEST(Exp, InFp32IsWithinTwoUlp) {
  double worst = 0;
  for (float x = -87.3f; x < 88.7f; x += 1.0f / 1024) {
    const double want = std::exp(double(x));
    const double ulp = std::ldexp(1.0, std::ilogb(want) - 23);
    worst = std::max(worst, std::abs(activations::exp_of(x) - want) / ulp);
  }
  EXPECT_LT(worst, 2.0);
  EXPECT_EQ(activations::exp_of(0.0f), 1.0f);
}

TEST(Exp, InFp32UnderflowsStepByStepAndOverflowsToInfinity) {
  for (float x = -104.5f; x < -87.3f; x += 1.0f / 128)
    EXPECT_NEAR(activations::exp_of(x), std::exp(double(x)),
                2e-7 * std::exp(double(x)) + std::ldexp(1.0, -149));
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(activations::exp_of(-104.1f), 0.0f);
  EXPECT_EQ(activations::exp_of(-kInfinity), 0.0f);
  EXPECT_EQ(activations::exp_of(88.8f), kInfinity);
  EXPECT_EQ(activations::exp_of(kInfinity), kInfinity);
  EXPECT_TRUE(std::isnan(activations::exp_of(float(kNan))));
}

TEST(Exp, OfNegativeNumbersHasTheSameBits) {
  for (uint32_t magnitude = 0; magnitude <= 0x7f80'0000u; magnitude += 509) {
    const float x = std::bit_cast<float>(0x8000'0000u | magnitude);
    ASSERT_EQ(activations::exp_of_negative(x), activations::exp_of(x)) << x;
  }
  EXPECT_EQ(activations::exp_of_negative(0.0f), 1.0f);
  EXPECT_TRUE(std::isnan(activations::exp_of_negative(float(kNan))));
}

TEST(Sigmoid, AndItsComplementAreSmallWithoutLoss) {
  for (float x = -104.9f; x < 90; x += 0.03f) {
    const activations::Sigmoid<float> s(x);
    const double want = 1 / (1 + std::exp(-double(x)));
    const double rest = x > 64 ? 0 : 1 / (1 + std::exp(double(x)));
    EXPECT_NEAR(s.value, want, 4e-7 * want + 0x1p-149) << x;
    EXPECT_NEAR(s.complement, rest, 4e-7 * rest) << x;
  }
}

TEST(Sigmoid, OfWhatIsNoFiniteNumber) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(activations::Sigmoid<float>(kInfinity).value, 1.0f);
  EXPECT_EQ(activations::Sigmoid<float>(kInfinity).complement, 0.0f);
  EXPECT_EQ(activations::Sigmoid<float>(-kInfinity).value, 0.0f);
  EXPECT_EQ(activations::Sigmoid<float>(-kInfinity).complement, 1.0f);
  EXPECT_TRUE(std::isnan(activations::Sigmoid<float>(float(kNan)).value));
  EXPECT_TRUE(std::isnan(activations::Sigmoid<float>(float(kNan)).complement));
}

TEST(Sigmoid, OfSmallNumbersHasTheSameBits) {
  for (uint32_t magnitude = 0; magnitude <= 0x4280'0000u; magnitude += 256)
    for (const uint32_t sign : {0u, 0x8000'0000u}) {
      const float x = std::bit_cast<float>(sign | magnitude);
      const activations::Sigmoid<float> want(x);
      const activations::SmallSigmoid got(x);
      ASSERT_EQ(got.value, want.value) << x;
      ASSERT_EQ(got.complement, want.complement) << x;
    }
}

template <class Activation>
void expect_same_bits_of_small_gates(const ActivationConstants& c) {
  using Small = typename Activation::Small;
  const float below = Activation::small_gates(c);
  ASSERT_GT(below, 0.0f);
  ASSERT_TRUE(std::isfinite(below));
  for (float gate = std::nextafter(below, 0.0f); gate > 1e-6f; gate *= 0.983f)
    for (const float x : {gate, -gate})
      for (const float up : {0.3f, -7.5f, 200.0f, -1e30f}) {
        ASSERT_EQ(Small::forward(x, up, c), Activation::forward(x, up, c)) << x;
        const auto want = Activation::backward(x, up, 0.7f, c);
        const auto got = Small::backward(x, up, 0.7f, c);
        ASSERT_EQ(got.value, want.value) << x;
        ASSERT_EQ(got.dgate, want.dgate) << x;
        ASSERT_EQ(got.dup, want.dup) << x;
      }
}

TEST(SmallGates, GiveTheSameBitsWithLessWork) {
  expect_same_bits_of_small_gates<activations::Silu>({});
  expect_same_bits_of_small_gates<activations::SwiGlu>({});
  for (const float alpha : {1.702f, -1.0f, 0.0f, 1e-30f, 1e-19f, 3e5f, 1e30f})
    for (const float limit : {7.0f, 1e-3f, 3e38f})
      expect_same_bits_of_small_gates<activations::ClampedSwiGlu>(
          {.limit = limit, .alpha = alpha, .offset = 1.0f});
}

TEST(Silu, HasTheSlopeOneAtLargeNumbers) {
  const ActivationConstants any{.limit = 3e38f, .alpha = 1.0f, .offset = 0.0f};
  for (float x = 32; x < 1e38f; x *= 1.7f) {
    EXPECT_NEAR(activations::Silu::backward(x, 0.0f, 1.0f, any).dgate, 1, 1e-6) << x;
    EXPECT_NEAR(activations::ClampedSwiGlu::backward(x, 1.0f, 1.0f, any).dgate, 1, 1e-6) << x;
  }
}

TEST(Normal, InFp32IsSmallWithoutLoss) {
  for (float x = -14; x < 14; x += 1.0f / 512) {
    const double want = std::erfc(-double(x) / std::sqrt(2.0)) / 2;
    const double density = std::exp(-double(x) * x / 2) / std::sqrt(2 * std::acos(-1.0));
    // Some 10 roundings, and those of x^2 / 2 in the exponent.
    const double relative = (10 + double(x) * x) * 0x1p-24;
    EXPECT_NEAR(activations::normal(x).below, want, relative * want + 0x1p-148) << x;
    EXPECT_NEAR(activations::normal(x).density, density, relative * density + 0x1p-148) << x;
  }
  EXPECT_EQ(activations::normal(-15.0f).below, 0.0f);
  EXPECT_EQ(activations::normal(15.0f).below, 1.0f);
  EXPECT_EQ(activations::normal(0.0f).below, 0.5f);
  EXPECT_TRUE(std::isnan(activations::normal(float(kNan)).below));
}

TEST(GluLayout, GivesEveryColumnToOneFeatureOfGateOrUp) {
  for (GluLayout layout : {GluLayout::kConcat, GluLayout::kInterleave1, GluLayout::kInterleave32}) {
    constexpr int64_t kFeatures = 96;
    std::set<int64_t> seen;
    for (int64_t f = 0; f < kFeatures; ++f) {
      const auto at = activations::glu_columns(layout, f, kFeatures);
      seen.insert({at.gate, at.up});
      EXPECT_LT(at.gate, at.up) << "the gate comes first";
      const auto first = activations::glu_columns(layout, f / 32 * 32, kFeatures);
      const int64_t step = activations::glu_step(layout);
      EXPECT_EQ(at.gate, first.gate + f % 32 * step);
      EXPECT_EQ(at.up, first.up + f % 32 * step);
    }
    EXPECT_EQ(seen.size(), size_t(2 * kFeatures));
    EXPECT_EQ(*seen.begin(), 0);
    EXPECT_EQ(*seen.rbegin(), 2 * kFeatures - 1);
  }
  using activations::glu_columns;
  EXPECT_EQ(glu_columns(GluLayout::kConcat, 33, 96).up, 129);
  EXPECT_EQ(glu_columns(GluLayout::kInterleave1, 33, 96).gate, 66);
  EXPECT_EQ(glu_columns(GluLayout::kInterleave32, 33, 96).gate, 65);
  EXPECT_EQ(glu_columns(GluLayout::kInterleave32, 33, 96).up, 97);
}

}  // namespace
