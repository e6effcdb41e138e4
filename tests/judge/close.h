#pragma once
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "cadre/dtype.h"
#include "cadre/error.h"

namespace cadre::test {

/// What one rounding to `dtype` may add to a value: half a step, subnormal steps included.
inline double rounding(DType dtype, double value) {
  const int precision = dtype == DType::kF32 ? 24 : dtype == DType::kF16 ? 11 : 8;
  const int lowest = dtype == DType::kF32 ? -150 : dtype == DType::kF16 ? -25 : -134;
  return std::ldexp(std::abs(value), -precision) + std::ldexp(1.0, lowest);
}

/// What `operations` roundings in fp32, one after another, may add to a sum of magnitude
/// `magnitude`: gamma(n) |x| of numerical analysis, with subnormal steps.
inline double gamma(int64_t operations, double magnitude) {
  const double nu = std::ldexp(double(operations), -24);
  return nu / (1 - nu) * magnitude + std::ldexp(double(operations), -149);
}

/// Compares element by element. Empty if |got - want| <= bound everywhere, NaN stands where NaN is
/// wanted and infinities are equal; else a sentence about the worst element. `columns` only shapes
/// the sentence.
inline std::string difference(std::span<const double> got, std::span<const double> want,
                              std::span<const double> bound, int64_t columns) {
  if (got.size() != want.size() || bound.size() != want.size())
    return text("sizes differ: got ", got.size(), ", want ", want.size(), ", bound ", bound.size());
  size_t outside = 0, worst = 0;
  double worst_excess = -1;
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::isnan(want[i]) ? std::isnan(got[i]) : got[i] == want[i]) continue;
    const double error = std::abs(got[i] - want[i]);
    if (error <= bound[i] && std::isfinite(error)) continue;  // false for NaN: it counts as outside
    const double excess = std::isfinite(error) && bound[i] > 0
                              ? error / bound[i]
                              : std::numeric_limits<double>::infinity();
    ++outside;
    if (excess > worst_excess) worst_excess = excess, worst = i;
  }
  if (outside == 0) return {};
  const int64_t width = columns > 0 ? columns : 1;
  return text(outside, " of ", want.size(), " elements are outside the bound; worst at [",
              int64_t(worst) / width, ", ", int64_t(worst) % width, "]: got ", got[worst],
              ", want ", want[worst], ", bound ", bound[worst]);
}

}  // namespace cadre::test
