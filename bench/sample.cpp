#include "bench/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "bench/cases/parts.h"
#include "bench/element.h"
#include "cadre/error.h"

namespace cadre::bench {
namespace {

constexpr int64_t kTail = 256;        // elements of the tail that are looked at
constexpr int64_t kFewRoundings = 8;  // of the epilogue

struct Sum {
  double value = 0, size = 0;
  void add(double x) { value += x, size += std::abs(x); }
};

// A matrix of the case, or one of E in a row; discrete ones lie in a row too.
struct Matrix {
  TensorView v;
  double at(int64_t i, int64_t j) const { return load(v, i * v.stride[0] + j * v.stride[1]); }
  double at(int e, int64_t i, int64_t j) const {
    return load(v, e * v.stride[0] + i * v.stride[1] + j * v.stride[2]);
  }
};

Matrix weights_of(const Operand& o) {
  Matrix m{o.codes};
  if (o.discrete) m.v.data = const_cast<void*>(o.discrete[0]);
  return m;
}

class Summer {
 public:
  explicit Summer(const GroupedGemmCase& c)
      : case_(c), p_(c.problem), out_(c.outputs[0].view), lhs_{c.args.lhs.codes} {
    rhs_ = weights_of(c.args.rhs);
    bias_.v = c.args.bias;
    if (c.args.discrete_bias) bias_.v.data = const_cast<void*>(c.args.discrete_bias[0]);
  }

  Sample::Element at(int64_t index) const {
    const int64_t j = index % out_[out_.rank - 1], i = index / out_[out_.rank - 1];
    int64_t terms = 0;
    const Sum s = p_.pass == Pass::kWgrad ? contraction(i, j, terms) : row(i, j, terms);
    const double nu = gamma(terms + kFewRoundings);
    return {index, s.value, nu * s.size + step_at(p_.out, std::abs(s.value) + nu * s.size)};
  }

 private:
  // The row of an operand that row r of the batch is.
  int64_t row_of(Gather operand, int64_t r) const {
    return p_.gather == operand ? case_.args.slot_of[r] / p_.top_k : r;
  }
  double alpha(int e) const { return p_.alpha ? case_.args.alpha[e] : 1.0; }

  Sum row(int64_t r, int64_t j, int64_t& terms) const {
    const auto& offsets = case_.offsets;
    const int e = int(std::upper_bound(offsets.begin(), offsets.end(), r) - offsets.begin()) - 1;
    const bool fprop = p_.pass == Pass::kFprop;
    terms = fprop ? p_.k : p_.n;
    Sum s;
    for (int64_t d = 0, i = row_of(Gather::kLhs, r); d < terms; ++d)
      s.add(alpha(e) * lhs_.at(i, d) * (fprop ? rhs_.at(e, j, d) : rhs_.at(e, d, j)));
    if (p_.beta) s.add(double(case_.args.beta[e]) * Matrix{case_.args.c}.at(r, j));
    if (p_.bias) s.add(bias_.at(e, j) * (p_.bias_scale ? case_.args.bias_scale[r] : 1.0));
    return s;
  }
  Sum contraction(int64_t i, int64_t k, int64_t& terms) const {
    const int e = int(i / p_.n);
    const int64_t n = i % p_.n, first = case_.offsets[size_t(e)];
    terms = case_.offsets[size_t(e) + 1] - first;
    Sum s;
    for (int64_t r = first; r < first + terms; ++r)
      s.add(alpha(e) * lhs_.at(row_of(Gather::kLhs, r), n) * rhs_.at(row_of(Gather::kRhs, r), k));
    if (adds(p_.accumulate, case_.args.accumulate, e)) s.add(Matrix{out_}.at(e, n, k));
    return s;
  }

  const GroupedGemmCase& case_;
  const GroupedGemmProblem& p_;
  TensorView out_;
  Matrix lhs_, rhs_, bias_;
};

// The output as it is poisoned: 0xff in every byte, which is NaN.
bool is_kept(const TensorView& v, int64_t i, Tail tail) {
  const float x = load(v, offset_of(v, i));
  return tail == Tail::kZero ? x == 0 : std::isnan(x);
}

}  // namespace

bool can_sample(const GroupedGemmProblem& p) {
  return is_plain(p.lhs) && is_plain(p.rhs) && !is_composed(p) && !p.scatter;
}

Sample draw_sample(const GroupedGemmCase& c, int64_t count, uint64_t seed) {
  const Output& out = c.outputs[0];
  const int64_t row = out.view[0] ? elements(out.view) / out.view[0] : 0;
  const auto live = uint64_t(out.live * row), all = uint64_t(elements(out.view));
  std::mt19937_64 random(seed);
  Sample sample;
  for (int64_t i = 0; i < count && live > 0; ++i)
    sample.elements.push_back({.index = int64_t(random() % live)});
  const Summer summer(c);
#pragma omp parallel for schedule(dynamic, 8)
  for (size_t i = 0; i < sample.elements.size(); ++i)
    sample.elements[i] = summer.at(sample.elements[i].index);
  for (int64_t i = 0; i < kTail && live < all; ++i)
    sample.tail.push_back(int64_t(live + random() % (all - live)));
  return sample;
}

Difference compare(const GroupedGemmCase& c, const Sample& sample) {
  const TensorView& v = c.outputs[0].view;
  Difference worst;
  for (const Sample::Element& e : sample.elements) {
    const double got = load(v, offset_of(v, e.index));
    double of_bound = std::abs(got - e.want) / e.bound;
    if (!std::isfinite(got)) of_bound = std::numeric_limits<double>::infinity();
    if (of_bound <= worst.of_bound) continue;
    worst.of_bound = of_bound;
    if (!worst.good())
      worst.where = text(c.outputs[0].name, " element ", e.index, " is ", got, ", want ", e.want,
                         " within ", e.bound);
  }
  for (const int64_t i : sample.tail)
    if (worst.good() && !is_kept(v, i, c.outputs[0].tail))
      worst = {std::numeric_limits<double>::infinity(),
               text("tail: ", c.outputs[0].name, " element ", i, " was written")};
  return worst;
}

}  // namespace cadre::bench
