#include <algorithm>
#include <cmath>

#include "bench/cases/parts.h"
#include "bench/element.h"

namespace cadre::bench {
namespace {

using Problem = ActivationProblem;
using ActivationCase = Case<ActivationProblem>;

constexpr int64_t kPointwiseRoundings = 64;  // exp, tanh and erf in fp32, with their arguments

// Sizes of the factors of one element: |act(gate)|, |act'(gate)| and |up|, each at the most.
struct Sizes {
  double value, slope, up;
};

Sizes sizes_at(const Problem& p, double gate, double up) {
  const bool squared = p.kind == ActivationKind::kReluSquared;
  const bool clamped = p.kind == ActivationKind::kClampedSwiGlu;
  const double g = std::abs(gate);
  return {.value = squared ? g * g : g,
          .slope = 2 * (1 + g) * (clamped ? 1 + std::abs(double(p.constants.alpha)) : 1),
          .up = !info(p.kind).gated ? 1
                : clamped           ? std::abs(up) + std::abs(double(p.constants.offset))
                                    : std::abs(up)};
}

// Columns of gate and up of feature f.
struct Columns {
  int64_t gate, up;
};

Columns columns(const Problem& p, int64_t f) {
  if (!info(p.kind).gated) return {f, f};
  switch (p.layout) {
    case GluLayout::kConcat:
      return {f, p.features + f};
    case GluLayout::kInterleave1:
      return {2 * f, 2 * f + 1};
    case GluLayout::kInterleave32:
      return {f / 32 * 64 + f % 32, f / 32 * 64 + 32 + f % 32};
  }
  return {};
}

struct RowSizes {
  std::vector<float>&h, &dz, &dprob;
};

void add_row(const ActivationCase& c, int64_t r, RowSizes to) {
  const Problem& p = c.problem;
  const int64_t width = c.args.z[1];
  const double prob = p.prob ? std::abs(c.args.prob[r]) : 1;
  double sum = 0;
  for (int64_t f = 0; f < p.features; ++f) {
    const Columns at = columns(p, f);
    const Sizes s = sizes_at(p, load(c.args.z, r * c.args.z.stride[0] + at.gate),
                             load(c.args.z, r * c.args.z.stride[0] + at.up));
    to.h[size_t(r * p.features + f)] = float(s.value * s.up * prob);
    if (!p.backward) continue;
    const double dh = std::abs(load(c.args.dh, r * c.args.dh.stride[0] + f));
    to.dz[size_t(r * width + at.up)] = float(dh * prob * s.value);
    to.dz[size_t(r * width + at.gate)] = float(dh * prob * s.slope * s.up);
    sum += dh * s.value * s.up;
  }
  to.dprob[size_t(r)] = float(sum);
}

// The copy along K, and what is written beside it has the bits of the operations one by one.
void make_copy(ActivationCase& c) {
  const QuantizedShape shape = copy_shape(c.problem);
  const int64_t bytes = quantized_bytes(shape);
  void* buffer = c.buffers->take(bytes);
  for (Output& out : c.outputs) out.exact = true;
  c.outputs.push_back({"along_k", view(buffer, DType::kU8, {bytes}), bytes, Tail::kKeep, true});
  c.args.along_k = quantized_view(shape, buffer);
}

}  // namespace

template <>
ActivationCase make_case(const ActivationProblem& p, const Draw& draw) {
  auto c = new_case<ActivationCase>(p, draw);
  Seeds seeds(draw);
  Buffers& buffers = *c.buffers;
  const Rows rows = draw_rows(buffers, draw, p.rows, p.experts);
  const int64_t live = rows.live(), width = z_columns(p.kind, p.features);
  c.offsets = rows.host;
  c.args.offsets = rows.offsets;
  c.args.z = buffers.tensor(p.z, {p.rows, width});
  fill_normal(c.args.z, live, seeds.next(), 3);
  if (p.prob) c.args.prob = random_floats(buffers, p.rows, live, seeds.next(), 0.5f);
  const bool plain = !p.along_k || p.plain;
  const auto write = [&](const char* name, TensorView& to, DType dtype, int64_t columns) {
    to = buffers.tensor(dtype, {p.rows, columns});
    c.outputs.push_back({name, to, live, p.tail});
  };
  if (plain || p.backward) write("h", c.args.h, p.h, p.features);
  if (p.backward) c.args.dh = random_tensor(buffers, p.h, {p.rows, p.features}, live, seeds.next());
  if (plain && p.backward) write("dz", c.args.dz, p.z, width);
  if (p.backward && p.prob) {
    c.args.dprob = buffers.array<float>(p.rows);
    c.outputs.push_back({"dprob", view(c.args.dprob, DType::kF32, {p.rows}), live, p.tail});
  }
  if (p.along_k) make_copy(c);
  return c;
}

template <>
int64_t shrink(ActivationProblem& p) {
  scale(p.rows, affordable(p.rows, double(p.features), kElementsOfASecond));
  return p.rows;
}

template <>
std::vector<Magnitude> magnitudes(const ActivationCase& c) {
  const Problem& p = c.problem;
  if (is_composed(p)) return std::vector<Magnitude>(c.outputs.size());  // exact
  std::vector<float> h(size_t(elements(c.args.h))), dz(p.backward ? size_t(elements(c.args.z)) : 0),
      dprob(size_t(p.rows));
  const int64_t live = c.offsets.back();
#pragma omp parallel for
  for (int64_t r = 0; r < live; ++r) add_row(c, r, {h, dz, dprob});
  std::vector<Magnitude> result;
  result.push_back({std::move(h), kPointwiseRoundings});
  if (p.backward) result.push_back({std::move(dz), kPointwiseRoundings});
  if (c.args.dprob) result.push_back({std::move(dprob), kPointwiseRoundings + p.features});
  return result;
}

template <>
Work work(const ActivationCase& c) {
  const int64_t live = c.offsets.back();
  double bytes = live_bytes(c.args.z, live) + live_bytes(c.args.h, live);
  if (c.problem.backward) bytes += bytes_of(c.args.dh) + live_bytes(c.args.dz, live);
  if (c.problem.along_k && c.problem.rows != 0)
    bytes += bytes_of(c.outputs.back().view) * double(live) / double(c.problem.rows);
  return {.flops = 0, .bytes = bytes};
}

}  // namespace cadre::bench
