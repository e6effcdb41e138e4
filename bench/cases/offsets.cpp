#include <numeric>

#include "bench/cases/parts.h"

namespace cadre::bench {
namespace {

using OffsetsCase = Case<OffsetsProblem>;

std::vector<int64_t> draw_source(const OffsetsProblem& p, const Draw& draw) {
  if (p.source == OffsetsSource::kRouting) return draw_choices(draw, p.tokens, p.top_k, p.experts);
  std::vector<int64_t> numbers = draw_counts(draw, p.rows, p.experts);
  if (p.source == OffsetsSource::kEnds)
    std::partial_sum(numbers.begin(), numbers.end(), numbers.begin());
  return numbers;
}

template <class Index>
void* copied(Buffers& buffers, const std::vector<int64_t>& numbers) {
  auto* data = buffers.array<Index>(int64_t(numbers.size()));
  for (size_t i = 0; i < numbers.size(); ++i) data[i] = Index(numbers[i]);
  return data;
}

}  // namespace

template <>
OffsetsCase make_case(const OffsetsProblem& p, const Draw& draw) {
  auto c = new_case<OffsetsCase>(p, draw);
  Buffers& buffers = *c.buffers;
  const auto numbers = draw_source(p, draw);
  c.args.source = p.index == DType::kI32 ? copied<int32_t>(buffers, numbers)
                                         : copied<int64_t>(buffers, numbers);
  const auto written = [&](const char* name, int64_t count) {
    auto* data = buffers.array<int32_t>(count);
    c.outputs.push_back({name, view(data, DType::kI32, {count}), count, Tail::kKeep, true});
    return data;
  };
  c.args.offsets = written("offsets", p.experts + 1);
  c.args.status = written("status", 1);
  if (p.source == OffsetsSource::kRouting)
    c.args.map = {written("row_of", p.tokens * p.top_k), written("slot_of", p.rows)};
  return c;
}

template <>
int64_t shrink(OffsetsProblem& p) {
  const double share = affordable(p.tokens * p.top_k, p.experts, kProductsOfASecond);
  scale(p.tokens, share);
  scale(p.rows, share);
  return p.rows;
}

template <>
std::vector<Magnitude> magnitudes(const OffsetsCase& c) {
  return std::vector<Magnitude>(c.outputs.size());
}

template <>
Work work(const OffsetsCase& c) {
  const OffsetsProblem& p = c.problem;
  const bool routing = p.source == OffsetsSource::kRouting;
  Work total{.flops = 0,
             .bytes = double(routing ? p.tokens * p.top_k : p.experts) * bits(p.index) / 8};
  for (const Output& out : c.outputs) total.bytes += bytes_of(out.view);
  return total;
}

}  // namespace cadre::bench
