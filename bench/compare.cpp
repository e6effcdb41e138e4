#include "bench/compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "bench/element.h"
#include "cadre/error.h"

namespace cadre::bench {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

int64_t extent_bytes(const TensorView& v) {
  if (elements(v) == 0) return 0;
  int64_t last = 0;
  for (size_t d = 0; d < size_t(v.rank); ++d) last += (v.shape[d] - 1) * v.stride[d];
  return bytes_for(v.dtype, last + 1);
}

std::string position(const TensorView& v, int64_t i) {
  std::string words;
  for (int d = v.rank - 1; d >= 0; --d) {
    words = text(i % v.shape[size_t(d)], words.empty() ? "" : ", ", words);
    i /= v.shape[size_t(d)];
  }
  return text("[", words, "]");
}

Difference compare_bytes(const Output& got, const std::byte* want) {
  const auto* data = static_cast<const std::byte*>(got.view.data);
  const int64_t bytes = extent_bytes(got.view);
  const auto at = std::mismatch(data, data + bytes, want).first - data;
  if (at == bytes) return {};
  return {kNever, text(got.name, " byte ", at, " is ", int(data[at]), ", want ", int(want[at]))};
}

Difference compare_live(const Output& got, const Output& want, const Magnitude& magnitude) {
  Difference worst;
  const int64_t row = got.view.shape[0] ? elements(got.view) / got.view.shape[0] : 0;
  for (int64_t i = 0; i < got.live * row; ++i) {
    const int64_t offset = offset_of(got.view, i);
    const double g = load(got.view, offset), w = load(want.view, offset);
    if (g == w || (std::isnan(g) && std::isnan(w))) continue;
    const double bound = gamma(magnitude.roundings) * magnitude.sizes[size_t(i)] +
                         step_at(got.view.dtype, std::max(std::abs(g), std::abs(w)));
    double of_bound = std::abs(g - w) / bound;
    if (!std::isfinite(g) || !std::isfinite(w)) of_bound = kNever;
    if (of_bound <= worst.of_bound) continue;
    worst.of_bound = of_bound;
    if (of_bound > 1)
      worst.where =
          text(got.name, position(got.view, i), " is ", g, ", want ", w, " within ", bound);
  }
  return worst;
}

// What the whole buffer must hold, given that the live elements are right.
std::vector<std::byte> expected(const Output& got, std::vector<std::byte> before) {
  const int64_t size = bits(got.view.dtype) / 8,
                row = got.view.shape[0] ? elements(got.view) / got.view.shape[0] : 0;
  for (int64_t i = 0; i < elements(got.view); ++i) {
    const int64_t at = offset_of(got.view, i) * size;
    if (i < got.live * row)
      std::memcpy(&before[size_t(at)], static_cast<const std::byte*>(got.view.data) + at,
                  size_t(size));
    else if (got.tail == Tail::kZero)
      std::memset(&before[size_t(at)], 0, size_t(size));
  }
  return before;
}

}  // namespace

double gamma(int64_t roundings) {
  const double nu = double(roundings) * std::ldexp(1.0, -24);
  return nu < 1 ? nu / (1 - nu) : kNever;
}

int64_t roundings_of_adder(int fraction_bits) {
  constexpr int kInstructions = 4, kCuts = 32 + 1 + 1, kPlain = 23;
  return fraction_bits == kPlain ? 0 : int64_t(kInstructions * kCuts) << (24 - fraction_bits);
}

std::vector<std::byte> snapshot(const Output& out) {
  const auto* data = static_cast<const std::byte*>(out.view.data);
  return {data, data + extent_bytes(out.view)};
}

Difference compare(const Output& got, const Output& want, const Magnitude& magnitude,
                   const std::vector<std::byte>& before) {
  if (got.exact) return compare_bytes(got, static_cast<const std::byte*>(want.view.data));
  const Difference live = compare_live(got, want, magnitude);
  if (!live.good()) return live;
  Difference rest = compare_bytes(got, expected(got, before).data());
  if (rest.good()) return live;
  rest.where = "tail or gap: " + rest.where;
  return rest;
}

}  // namespace cadre::bench
