#pragma once
#include "activations/glu_layout.h"
#include "activations/list.h"
#include "cadre/grouped_mlp.h"
#include "tests/layers/sum.h"

// The expert MLP in double, stage by stage from its formulas. Every stage says how far from it a
// layer in fp32 may be, given how far its inputs are.
namespace cadre::test {

/// The sizes of one model, and whose rows are whose.
struct MlpSizes {
  GroupedMlpProblem p;
  std::vector<int32_t> offsets;

  int64_t rows() const { return offsets.back(); }
  int64_t z_columns() const { return info(p.activation).gated ? 2 * p.features : p.features; }
  int expert_of(int64_t r) const {
    int e = 0;
    while (offsets[size_t(e) + 1] <= r) ++e;
    return e;
  }
};

/// One linear of the model: w [E, N, K], bias [E, N], its factor per row; both may be empty.
struct LinearStage {
  const MlpSizes& sizes;
  int64_t n, k;
  const Values& w;
  const Values& bias;
  const Values& bias_scale;

  double weight(int64_t e, int64_t i, int64_t j) const { return w[size_t((e * n + i) * k + j)]; }
  double scale(int64_t r) const { return bias_scale.empty() ? 1 : bias_scale[size_t(r)]; }

  std::vector<Sum> out(const Inexact& x) const {
    std::vector<Sum> y(size_t(sizes.rows() * n));
    for (int64_t r = 0; r < sizes.rows(); ++r)
      for (int64_t i = 0; i < n; ++i) {
        Sum& sum = y[size_t(r * n + i)];
        const int e = sizes.expert_of(r);
        for (int64_t j = 0; j < k; ++j) {
          const size_t at = size_t(r * k + j);
          sum.add(x.value[at] * weight(e, i, j), x.error[at] * std::abs(weight(e, i, j)));
        }
        if (!bias.empty()) sum.add(bias[size_t(e * n + i)] * scale(r));
      }
    return y;
  }
  std::vector<Sum> dx(const Inexact& dy) const {
    std::vector<Sum> all(size_t(sizes.rows() * k));
    for (int64_t r = 0; r < sizes.rows(); ++r)
      for (int64_t j = 0; j < k; ++j)
        for (int64_t i = 0; i < n; ++i) {
          const double weight_ = weight(sizes.expert_of(r), i, j);
          const size_t at = size_t(r * n + i);
          all[size_t(r * k + j)].add(dy.value[at] * weight_, dy.error[at] * std::abs(weight_));
        }
    return all;
  }
  std::vector<Sum> dw(const Inexact& dy, const Inexact& x) const {
    std::vector<Sum> all(w.size());
    for (int64_t r = 0; r < sizes.rows(); ++r)
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j < k; ++j) {
          const size_t a = size_t(r * n + i), b = size_t(r * k + j);
          all[size_t((sizes.expert_of(r) * n + i) * k + j)].add(
              dy.value[a] * x.value[b], std::abs(dy.value[a]) * x.error[b] +
                                            dy.error[a] * (std::abs(x.value[b]) + x.error[b]));
        }
    return all;
  }
  std::vector<Sum> dbias(const Inexact& dy) const {
    std::vector<Sum> all(size_t(sizes.p.experts * n));
    for (int64_t r = 0; r < sizes.rows(); ++r)
      for (int64_t i = 0; i < n; ++i) {
        const size_t at = size_t(r * n + i);
        all[size_t(sizes.expert_of(r) * n + i)].add(dy.value[at] * scale(r),
                                                    dy.error[at] * scale(r));
      }
    return all;
  }
  std::vector<Sum> dscale(const Inexact& dy) const {
    std::vector<Sum> all(size_t(sizes.rows()));
    for (int64_t r = 0; r < sizes.rows(); ++r)
      for (int64_t i = 0; i < n; ++i)
        all[size_t(r)].add(dy.value[size_t(r * n + i)] * bias[size_t(sizes.expert_of(r) * n + i)]);
    return all;
  }
};

/// The activation of one element by the formulas of the contract.
inline double act(const GroupedMlpProblem& p, double gate, double up) {
  const auto sigmoid = [](double v) { return 1 / (1 + std::exp(-v)); };
  const auto gelu = [](double v) { return 0.5 * v * (1 + std::erf(v / std::sqrt(2.0))); };
  const auto gelu_tanh = [](double v) {
    return 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
  };
  const auto relu = [](double v) { return v > 0 ? v : 0; };
  const double limit = p.constants.limit;
  switch (p.activation) {
    case ActivationKind::kSwiGlu:
      return gate * sigmoid(gate) * up;
    case ActivationKind::kGeGlu:
      return gelu(gate) * up;
    case ActivationKind::kGeGluTanh:
      return gelu_tanh(gate) * up;
    case ActivationKind::kReGlu:
      return relu(gate) * up;
    case ActivationKind::kClampedSwiGlu: {
      const double g = std::min(gate, limit), u = std::clamp(up, -limit, limit);
      return g * sigmoid(p.constants.alpha * g) * (u + p.constants.offset);
    }
    case ActivationKind::kSilu:
      return gate * sigmoid(gate);
    case ActivationKind::kGelu:
      return gelu(gate);
    case ActivationKind::kGeluTanh:
      return gelu_tanh(gate);
    case ActivationKind::kRelu:
      return relu(gate);
    case ActivationKind::kReluSquared:
      return relu(gate) * relu(gate);
  }
  return 0;
}

/// The activation of the model.
struct ActivationStage {
  const MlpSizes& sizes;
  const Values& prob;  ///< empty: none

  struct Backward {
    Inexact dz;
    std::vector<Sum> dprob;
  };

  /// What fp32 may lose of a value or slope of magnitude `m` at a gate: some 16 roundings, and what
  /// the roundings of the argument of e^x cost; of a slope f = s + x s' the terms count, at most 2
  /// more than f.
  static double lost(double gate, double m) {
    const double x = std::abs(gate);
    return gamma(24 + int64_t(10 * x + 2 * x * x + x * x * x), m);
  }

  double p_of(int64_t r) const { return prob.empty() ? 1 : prob[size_t(r)]; }
  activations::GluColumns columns(int64_t f) const {
    return info(sizes.p.activation).gated
               ? activations::glu_columns(sizes.p.layout, f, sizes.p.features)
               : activations::GluColumns{f, f};
  }
  double factor(double up) const {
    return info(sizes.p.activation).gated ? std::abs(up) + sizes.p.constants.offset : 1;
  }

  Inexact h(const Values& z, DType dtype) const {
    Inexact all;
    for (int64_t r = 0; r < sizes.rows(); ++r)
      for (int64_t f = 0; f < sizes.p.features; ++f) {
        const double gate = z[size_t(r * sizes.z_columns() + columns(f).gate)];
        const double up = z[size_t(r * sizes.z_columns() + columns(f).up)];
        const double value = act(sizes.p, gate, up) * p_of(r);
        const double error = lost(gate, (std::abs(act(sizes.p, gate, 1)) + 1e-30) * factor(up));
        all.value.push_back(value);
        all.error.push_back(p_of(r) * error + gamma(2, std::abs(value)) +
                            1.001 * rounding(dtype, value));
      }
    return all;
  }

  /// The slopes come from the library's own formulas in double; a test holds them against
  /// differences of `act`.
  Backward backward(const Values& z, const Values& dh, DType dtype) const {
    Backward b;
    b.dz = Inexact(Values(z.size(), 0));
    b.dprob.resize(size_t(sizes.rows()));
    for (int64_t r = 0; r < sizes.rows(); ++r)
      for (int64_t f = 0; f < sizes.p.features; ++f) {
        const size_t gate_at = size_t(r * sizes.z_columns() + columns(f).gate);
        const size_t up_at = size_t(r * sizes.z_columns() + columns(f).up);
        const double gate = z[gate_at], up = z[up_at], d = dh[size_t(r * sizes.p.features + f)];
        activations::All::visit(sizes.p.activation, [&]<class Row>(Row) {
          const auto slope = Row::backward(gate, up, d * p_of(r), sizes.p.constants);
          const double scaled = std::abs(d) * p_of(r);
          const auto put = [&](size_t at, double value, double magnitude) {
            b.dz.value[at] = value;
            b.dz.error[at] = scaled * lost(gate, magnitude) + gamma(4, std::abs(value)) +
                             1.001 * rounding(dtype, value);
          };
          put(gate_at, slope.dgate,
              (std::abs(Row::backward(gate, 1.0, 1.0, sizes.p.constants).dgate) + 2) * factor(up));
          if (info(sizes.p.activation).gated) put(up_at, slope.dup, std::abs(slope.dup));
        });
        const double value = act(sizes.p, gate, up);
        b.dprob[size_t(r)].add(
            d * value,
            std::abs(d) * lost(gate, (std::abs(act(sizes.p, gate, 1)) + 1e-30) * factor(up)));
      }
    return b;
  }
};

}  // namespace cadre::test
