#pragma once
#include <cmath>

#include "tests/layers/moe_case.h"

// The expert layer in double, token by token in a loop over its experts: softmax of the chosen
// logits, SwiGLU with gates first, biases.
namespace cadre::test {

/// A number, and what errors relative to its terms are relative to: the same formula over
/// magnitudes, with the steepest slopes of what is no product or sum.
struct Sized {
  double value = 0, size = 0;

  Sized(double v = 0) : value(v), size(std::abs(v)) {}
  Sized(double v, double s) : value(v), size(s) {}
  friend Sized operator+(Sized a, Sized b) { return {a.value + b.value, a.size + b.size}; }
  friend Sized operator-(Sized a, Sized b) { return {a.value - b.value, a.size + b.size}; }
  friend Sized operator*(Sized a, Sized b) { return {a.value * b.value, a.size * b.size}; }
  Sized& operator+=(Sized a) { return *this = *this + a; }
};

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
/// |silu'| is at most 1.1 and |silu''| at most 0.5.
inline Sized silu(Sized x) { return {x.value * sigmoid(x.value), 1.1 * x.size}; }
inline Sized silu_slope(Sized x) {
  const double s = sigmoid(x.value);
  return {s * (1 + x.value * (1 - s)), 1.1 + 0.5 * x.size};
}

struct MoeModel {
  const MoeCase& c;
  int64_t T = c.p().tokens, K = c.p().top_k, H = c.p().hidden;
  int64_t E = c.p().experts;
  using Numbers = std::vector<Sized>;

  /// Experts, and the gradients of what they have.
  struct Mlps {
    const MlpCase* own;
    int64_t E, H, F;
    Numbers dw1 = Numbers(size_t(E * 2 * F * H)), dw2 = Numbers(size_t(E * H * F));
    Numbers dbias1 = Numbers(size_t(E * 2 * F)), dbias2 = Numbers(size_t(E * H));

    double w1(int64_t e, int64_t n, int64_t h) const { return own->fc1.w.at(e, n, h); }
    double w2(int64_t e, int64_t h, int64_t f) const { return own->fc2.w.at(e, h, f); }
    double bias1(int64_t e, int64_t n) const {
      return own->p().bias1 ? own->fc1.bias.at(e, 0, n) : 0;
    }
    double bias2(int64_t e, int64_t h) const {
      return own->p().bias2 ? own->fc2.bias.at(e, 0, h) : 0;
    }
  };
  Mlps experts{&c.mlp, E, H, c.p().features};
  Mlps shared{c.shared ? &*c.shared : nullptr, 1, H, c.p().shared_features};
  Numbers out = Numbers(size_t(T * H)), dx = out, dlogits = Numbers(size_t(T * E));
  Numbers dgate = Numbers(size_t(T));

  explicit MoeModel(const MoeCase& of) : c(of) {
    for (int64_t t = 0; t < T; ++t) add_token(t);
  }

  /// Roundings on the longest way from an input to a gradient.
  int64_t roundings() const { return 3 * H + 2 * std::max(experts.F, shared.F) + T + 4 * K + 60; }

 private:
  struct Choice {
    int64_t expert;
    Sized prob;
  };

  std::vector<Choice> choose(int64_t t) const {
    std::vector<Choice> all;
    for (int64_t e = 0; e < E; ++e) all.push_back({e, c.logits.at(t, e)});
    std::sort(all.begin(), all.end(),
              [](const Choice& a, const Choice& b) { return a.prob.value > b.prob.value; });
    all.resize(size_t(K));
    double sum = 0;
    const double most = all[0].prob.value;
    for (Choice& choice : all) {
      const double power = std::exp(choice.prob.value - most);
      choice.prob = {power, power * (4 + std::abs(choice.prob.value) + std::abs(most))};
      sum += power;
    }
    for (Choice& choice : all) choice.prob = choice.prob * Sized(1 / sum);
    return all;
  }

  void add_token(int64_t t) {
    const std::vector<Choice> chosen = choose(t);
    Numbers dprob;
    for (const Choice& choice : chosen) dprob.push_back(add_expert(t, choice, experts));
    if (c.shared)
      dgate[size_t(t)] = add_expert(t, {0, c.p().shared_gate ? c.shared->prob.at(t) : 1.0}, shared);
    Sized mean;
    for (size_t j = 0; j < chosen.size(); ++j) mean += chosen[j].prob * dprob[j];
    for (size_t j = 0; j < chosen.size(); ++j)
      dlogits[size_t(t * E + chosen[j].expert)] = chosen[j].prob * (dprob[j] - mean);
  }

  /// One expert's share of a token and of all gradients; the gradient of its probability.
  Sized add_expert(int64_t t, const Choice& choice, Mlps& m) {
    const auto [e, p] = choice;
    const int64_t F = m.F;
    Numbers z(size_t(2 * F)), dz = z;
    for (int64_t n = 0; n < 2 * F; ++n) {
      z[size_t(n)] = m.bias1(e, n);
      for (int64_t h = 0; h < H; ++h)
        z[size_t(n)] += Sized(c.tokens.at(t, h)) * Sized(m.w1(e, n, h));
    }
    Sized dprob;
    for (int64_t h = 0; h < H; ++h) {
      const Sized bias = m.bias2(e, h), dout = c.dout.at(t, h);
      out[size_t(t * H + h)] += p * bias;
      m.dbias2[size_t(e * H + h)] += p * dout;
      dprob += dout * bias;
    }
    for (int64_t f = 0; f < F; ++f) {
      const Sized gate = z[size_t(f)], up = z[size_t(F + f)], a = silu(gate) * up;
      Sized dh;
      for (int64_t h = 0; h < H; ++h) {
        const Sized w = m.w2(e, h, f), dout = c.dout.at(t, h);
        out[size_t(t * H + h)] += p * a * w;
        m.dw2[size_t((e * H + h) * F + f)] += p * a * dout;
        dh += dout * w;
      }
      dprob += dh * a;
      dz[size_t(f)] = dh * p * up * silu_slope(gate);
      dz[size_t(F + f)] = dh * p * silu(gate);
    }
    for (int64_t n = 0; n < 2 * F; ++n) {
      m.dbias1[size_t(e * 2 * F + n)] += dz[size_t(n)];
      for (int64_t h = 0; h < H; ++h) {
        m.dw1[size_t((e * 2 * F + n) * H + h)] += dz[size_t(n)] * Sized(c.tokens.at(t, h));
        dx[size_t(t * H + h)] += dz[size_t(n)] * Sized(m.w1(e, n, h));
      }
    }
    return dprob;
  }
};

}  // namespace cadre::test
