#pragma once
#include <gtest/gtest.h>

#include "cadre/grouped_linear.h"
#include "tests/layers/linear_case.h"
#include "tests/layers/sum.h"

// A grouped linear layer in double, from its formulas, with the bound of every element: for recipes
// whose formats are plain.
namespace cadre::test {

/// A value as a product in this plain format reads it.
inline double cast(const Format& format, double value) {
  cpu::visit_float(format.element,
                   [&]<class Float>(Float) { value = Float::decode(Float::encode(value)); });
  return value;
}

/// What a step wrote against the formulas. `before` is an equal case that has not run.
class LinearModel {
 public:
  LinearModel(const LinearCase& before, const LinearCase& after)
      : c_(before), got_(after), p_(before.p()) {}

  void check() const {
    for (int e = 0; e < p_.experts; ++e) {
      for (int64_t r = c_.offsets[size_t(e)]; r < c_.offsets[size_t(e) + 1]; ++r) check_row(e, r);
      check_parameters(e);
    }
    check_tail(got_.y, true);
    check_tail(got_.dx, p_.dgrad);
    EXPECT_EQ(got_.damage(), "") << to_string(p_);
  }

 private:
  double x(const Format& f, int64_t r, int64_t k) const { return cast(f, c_.x.at(r, k)); }
  double dy(const Format& f, int64_t r, int64_t n) const { return cast(f, c_.dy.at(r, n)); }
  double w(const Format& f, int e, int64_t n, int64_t k) const {
    return cast(f, c_.parameters.w.at(e, n, k));
  }
  bool learns_bias() const { return p_.bias && p_.dbias && !p_.return_bias; }
  double bias_scale(int64_t r) const { return p_.bias_scale ? c_.bias_scale.at(r) : 1; }

  void near(const char* what, double got, const Sum& want, DType out) const {
    EXPECT_NEAR(got, want.value, want.bound(out)) << what << " of " << to_string(p_);
  }

  void check_row(int e, int64_t r) const {
    for (int64_t n = 0; n < p_.n; ++n) {
      Sum y;
      for (int64_t k = 0; k < p_.k; ++k)
        y.add(x(p_.recipe.fprop.lhs, r, k) * w(p_.recipe.fprop.rhs, e, n, k));
      if (p_.bias && !p_.return_bias) y.add(c_.parameters.bias.at(e, 0, n) * bias_scale(r));
      near("y", got_.y.at(r, n), y, p_.dtype);
    }
    for (int64_t k = 0; k < p_.k && p_.dgrad; ++k) {
      Sum dx;
      for (int64_t n = 0; n < p_.n; ++n)
        dx.add(dy(p_.recipe.dgrad.lhs, r, n) * w(p_.recipe.dgrad.rhs, e, n, k));
      near("dx", got_.dx.at(r, k), dx, p_.dtype);
    }
    if (!learns_bias() || !p_.bias_scale) return;
    Sum dscale;
    for (int64_t n = 0; n < p_.n; ++n) dscale.add(c_.dy.at(r, n) * c_.parameters.bias.at(e, 0, n));
    near("dbias_scale", got_.dbias_scale.at(r), dscale, DType::kF32);
  }

  /// An expert without rows: zero where its gradient is overwritten, else untouched.
  void check_parameters(int e) const {
    const int64_t first = c_.offsets[size_t(e)], last = c_.offsets[size_t(e) + 1];
    const Parameters &own = c_.parameters, &got = got_.parameters;
    for (int64_t n = 0; n < p_.n && p_.wgrad; ++n)
      for (int64_t k = 0; k < p_.k; ++k) {
        Sum dw;
        if (Parameters::adds(p_.options.accumulate, own.words, e)) dw.add(own.dw.at(e, n, k));
        if (first == last) {
          EXPECT_EQ(got.dw.at(e, n, k), dw.value) << to_string(p_);
          continue;
        }
        for (int64_t r = first; r < last; ++r)
          dw.add(dy(p_.recipe.wgrad.lhs, r, n) * x(p_.recipe.wgrad.rhs, r, k));
        near("dw", got.dw.at(e, n, k), dw, p_.parameters.dw);
      }
    for (int64_t n = 0; n < p_.n && learns_bias(); ++n) {
      Sum dbias;
      if (Parameters::adds(p_.options.accumulate_bias, own.bias_words, e))
        dbias.add(own.dbias.at(e, 0, n));
      for (int64_t r = first; r < last; ++r) dbias.add(c_.dy.at(r, n) * bias_scale(r));
      near("dbias", got.dbias.at(e, 0, n), dbias, p_.parameters.dbias);
    }
  }

  void check_tail(const Tensor& t, bool written) const {
    for (int64_t r = c_.counts.used(); r < p_.rows; ++r)
      for (int64_t i = 0; i < t.columns(); ++i)
        EXPECT_TRUE(written && p_.options.tail == Tail::kZero ? t.at(r, i) == 0
                                                              : std::isnan(t.at(r, i)))
            << "tail of " << to_string(p_);
  }

  const LinearCase& c_;
  const LinearCase& got_;
  const GroupedLinearProblem& p_;
};

}  // namespace cadre::test
