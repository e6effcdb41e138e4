#include <algorithm>
#include <cmath>

#include "bench/cases/parts.h"
#include "bench/element.h"

namespace cadre::bench {
namespace {

using QuantizeCase = Case<QuantizeProblem>;

constexpr int kBlocks = 16;  // rows and columns that share a factor

// Spreads the sizes of neighbouring blocks over many powers of two, and empties some.
void vary_blocks(const TensorView& v, int64_t live, uint64_t seed) {
  const int64_t row = v.shape[0] ? elements(v) / v.shape[0] : 0;
#pragma omp parallel for
  for (int64_t i = 0; i < live * row; ++i) {
    const uint64_t block = uint64_t(i / row / kBlocks * 65537 + i % row / kBlocks);
    const float pick = normal(seed, block);
    const float factor = pick > 1.5f ? 0 : std::exp2(std::round(4 * pick));
    store(v, offset_of(v, i), load(v, offset_of(v, i)) * factor);
  }
}

Slots slots_of(const QuantizeProblem& p) { return {p.rows, p.tokens, p.top_k}; }

QuantizedView make_copy(QuantizeCase& c, const char* name, Axis axis) {
  const QuantizedShape shape = copy_shape(c.problem, axis);
  const int64_t bytes = quantized_bytes(shape);
  void* buffer = c.buffers->take(bytes);
  c.outputs.push_back({name, view(buffer, DType::kU8, {bytes}), bytes, Tail::kKeep, true});
  return quantized_view(shape, buffer);
}

}  // namespace

template <>
QuantizeCase make_case(const QuantizeProblem& p, const Draw& draw) {
  auto c = new_case<QuantizeCase>(p, draw);
  Seeds seeds(draw);
  Buffers& buffers = *c.buffers;
  if (p.kind == RowsKind::kRagged) {
    const Rows rows = draw_rows(buffers, draw, p.rows, p.experts);
    c.offsets = rows.host;
    c.args.offsets = rows.offsets;
    const int64_t there = p.gather ? p.tokens : p.rows, live = p.gather ? there : rows.live();
    c.args.source = random_tensor(buffers, p.source, {there, p.cols}, live, seeds.next());
    vary_blocks(c.args.source, live, seeds.next());
    if (p.gather) c.args.slot_of = random_slots(buffers, rows, slots_of(p), seeds.next());
  } else {
    c.args.source =
        random_tensor(buffers, p.source, {p.experts, p.rows, p.cols}, p.experts, seeds.next());
    vary_blocks(c.args.source, p.experts, seeds.next());
  }
  if (p.along_k) c.args.along_k = make_copy(c, "along_k", Axis::kAlongK);
  if (p.along_rows) c.args.along_rows = make_copy(c, "along_rows", Axis::kAlongRows);
  if ((p.along_k && p.along_k->stochastic) || (p.along_rows && p.along_rows->stochastic)) {
    auto* rng = buffers.array<uint64_t>(2);
    rng[0] = draw.seed;
    rng[1] = seeds.next();
    c.args.rng = rng;
  }
  if (p.discrete) {
    c.args.discrete = pointers(buffers, true, c.args.source.data,
                               bytes_for(p.source, c.args.source.stride[0]), p.experts);
    c.args.source.data = nullptr;
  }
  return c;
}

template <>
int64_t shrink(QuantizeProblem& p) {
  const double experts = p.kind == RowsKind::kWeights ? p.experts : 1;
  const double share = affordable(p.rows, experts * double(p.cols), kElementsOfASecond);
  scale(p.rows, share, 128);
  scale(p.tokens, share);
  return p.rows;
}

template <>
std::vector<Magnitude> magnitudes(const QuantizeCase& c) {
  return std::vector<Magnitude>(c.outputs.size());
}

static int reads(const QuantizeProblem& p) {
  const auto twice = [](const std::optional<Format>& format) {
    return format && reads_source_twice(*format);
  };
  return twice(p.along_k) || twice(p.along_rows) ? 2 : 1;
}

template <>
Work work(const QuantizeCase& c) {
  const bool ragged = c.problem.kind == RowsKind::kRagged;
  const double share =
      ragged && c.problem.rows ? double(c.offsets.back()) / double(c.problem.rows) : 1.0;
  const TensorView& source = c.args.source;
  const int64_t tokens = std::min<int64_t>(c.problem.tokens, ragged ? c.offsets.back() : 0);
  const double once = c.problem.gather ? live_bytes(source, tokens) : bytes_of(source) * share;
  Work total{.flops = 0, .bytes = reads(c.problem) * once};
  for (const Output& out : c.outputs) total.bytes += bytes_of(out.view) * share;
  return total;
}

}  // namespace cadre::bench
