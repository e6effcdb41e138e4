#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "cadre/dtype.h"
#include "tests/judge/close.h"

namespace cadre::test {

using Values = std::vector<double>;

/// Values, and how far from them the values may be that the layer had instead.
struct Inexact {
  Values value, error;

  Inexact() = default;
  Inexact(const Values& exact) : value(exact), error(exact.size(), 0) {}
};

/// A sum of products in double, the sum of their magnitudes, and what errors of the factors add.
struct Sum {
  double value = 0, magnitude = 0, error = 0;
  int64_t terms = 0;

  void add(double term, double term_error = 0) {
    value += term;
    magnitude += std::abs(term) + term_error;
    error += term_error;
    ++terms;
  }
  /// Products and sums in fp32 in any order, two more operations, and one rounding.
  double bound(DType out) const {
    const double before = error + gamma(terms + 2, magnitude);
    return before + 1.001 * rounding(out, std::abs(value) + before);
  }
};

inline Values values(const std::vector<Sum>& sums) {
  Values all;
  for (const Sum& sum : sums) all.push_back(sum.value);
  return all;
}

}  // namespace cadre::test
