#include <bit>

#include "bench/cases/parts.h"

namespace cadre::bench {
namespace {

using PermuteCase = Case<PermuteProblem>;

bool is_backward(PermutePass pass) {
  return pass == PermutePass::kPermuteBackward || pass == PermutePass::kCombineBackward;
}

/// Tokens and rows that the map speaks of: what is read lies in the memories of all ranks.
int64_t tokens_of(const PermuteProblem& p) {
  return (reads_tokens(p.pass) ? p.ranks : 1) * p.tokens;
}
int64_t rows_of(const PermuteProblem& p) { return (reads_tokens(p.pass) ? 1 : p.ranks) * p.rows; }

/// [count, H], or that of every rank.
TensorView matrix(const PermuteProblem& p, int64_t count, bool is_read, Buffers& buffers) {
  return is_read && p.ranks > 1 ? buffers.tensor(p.dtype, {p.ranks, count, p.hidden})
                                : buffers.tensor(p.dtype, {count, p.hidden});
}

TensorView of_ranks(const TensorView& v, int ranks) {
  return ranks == 1 ? v : view(v.data, v.dtype, {ranks, v[0] / ranks, v[1]});
}

/// What moves as it is stored: any bits.
void make_codes(PermuteCase& c, int64_t live, Seeds& seeds) {
  const PermuteProblem& p = c.problem;
  QuantizedShape shape{.rows = p.ranks * p.tokens, .cols = p.hidden, .format = *p.format};
  int64_t bytes = quantized_bytes(shape);
  auto* tokens = static_cast<std::byte*>(c.buffers->take(bytes));
  for (int64_t i = 0, seed = int64_t(seeds.next()); i < bytes; ++i)
    tokens[i] = std::byte(std::bit_cast<uint32_t>(normal(uint64_t(seed), uint64_t(i))));
  const QuantizedView from = quantized_view(shape, tokens);
  c.args.tokens = of_ranks(from.codes, p.ranks);
  c.args.token_scales = of_ranks(from.scales, p.ranks);
  shape.rows = p.rows, shape.scales_major = p.scales_major;
  bytes = quantized_bytes(shape);
  const QuantizedView to = quantized_view(shape, c.buffers->take(bytes));
  c.args.rows = to.codes, c.args.row_scales = to.scales;
  c.outputs.push_back({"rows", to.codes, live, p.tail, true});
  c.outputs.push_back({"row_scales", to.scales, live, p.tail, true});
}

void make_probabilities(PermuteCase& c, int64_t live, Seeds& seeds) {
  const PermuteProblem& p = c.problem;
  Buffers& buffers = *c.buffers;
  const int64_t slots = tokens_of(p) * p.top_k;
  if (p.pass == PermutePass::kPermuteBackward) {
    c.args.drow_prob = random_floats(buffers, rows_of(p), live, seeds.next());
    c.args.drow_scale = random_floats(buffers, rows_of(p), live, seeds.next());
  } else {
    c.args.prob = random_floats(buffers, slots, slots, seeds.next(), 0.5f);
  }
  if (p.pass == PermutePass::kPermute) {
    c.args.row_prob = buffers.array<float>(p.rows);
    c.outputs.push_back({"row_prob", view(c.args.row_prob, DType::kF32, {p.rows}), live, p.tail});
  }
  if (is_backward(p.pass)) {
    c.args.dprob = buffers.array<float>(slots);
    c.outputs.push_back({"dprob", view(c.args.dprob, DType::kF32, {p.tokens, p.top_k}), p.tokens});
  }
}

}  // namespace

template <>
PermuteCase make_case(const PermuteProblem& p, const Draw& draw) {
  auto c = new_case<PermuteCase>(p, draw);
  Seeds seeds(draw);
  Buffers& buffers = *c.buffers;
  const RandomMap random = random_map(buffers, draw,
                                      {.source = OffsetsSource::kRouting,
                                       .rows = rows_of(p),
                                       .experts = p.experts > 0 ? p.experts : 2 * p.top_k,
                                       .tokens = tokens_of(p),
                                       .top_k = p.top_k,
                                       .index = DType::kI64});
  const bool by_row = reads_tokens(p.pass);
  const int64_t live = random.rows.live();
  c.offsets = random.rows.host;
  if (p.experts > 0 && (p.ranks == 1 || by_row)) c.args.offsets = random.rows.offsets;
  c.args.map = random.map;
  if (p.format) {
    make_codes(c, live, seeds);
    if (p.prob) make_probabilities(c, live, seeds);
    return c;
  }
  c.args.tokens = matrix(p, p.tokens, by_row, buffers);
  c.args.rows = matrix(p, p.rows, !by_row, buffers);
  if (by_row) {
    fill_normal(c.args.tokens, c.args.tokens[0], seeds.next());
    c.outputs.push_back({"rows", c.args.rows, live, p.tail, p.pass == PermutePass::kPermute});
  } else {
    fill_normal(c.args.rows, p.ranks > 1 ? c.args.rows[0] : live, seeds.next());
    c.outputs.push_back({"tokens", c.args.tokens, p.tokens});
  }
  if (p.addend)
    c.args.addend = random_tensor(buffers, p.dtype, {p.tokens, p.hidden}, p.tokens, seeds.next());
  if (p.prob && p.pass == PermutePass::kCombineBackward)
    c.args.y = random_tensor(buffers, p.dtype, {p.rows, p.hidden}, live, seeds.next());
  if (p.prob) make_probabilities(c, live, seeds);
  return c;
}

template <>
int64_t shrink(PermuteProblem& p) {
  const double share = affordable(p.tokens * p.top_k, double(p.hidden), kElementsOfASecond);
  scale(p.tokens, share);
  scale(p.rows, share);
  return p.rows;
}

template <>
std::vector<Magnitude> magnitudes(const PermuteCase& c) {
  if (c.problem.format) return std::vector<Magnitude>(c.outputs.size());
  Buffers buffers;
  PermuteProblem sizes = c.problem;
  sizes.dtype = DType::kF32;
  const int64_t slots = tokens_of(sizes) * sizes.top_k;
  PermuteArgs args = c.args;
  args.tokens = absolute(buffers, c.args.tokens);
  args.rows = absolute(buffers, c.args.rows);
  if (c.args.y) args.y = absolute(buffers, c.args.y);
  if (c.args.addend) args.addend = absolute(buffers, c.args.addend);
  args.prob = absolute(buffers, c.args.prob, slots);
  args.drow_prob = absolute(buffers, c.args.drow_prob, rows_of(sizes));
  args.drow_scale = absolute(buffers, c.args.drow_scale, rows_of(sizes));
  if (c.args.row_prob) args.row_prob = buffers.array<float>(sizes.rows);
  if (c.args.dprob) args.dprob = buffers.array<float>(slots);
  run_on_cpu(sizes, args, "cpu_reference");
  std::vector<Magnitude> result;
  result.push_back(
      {values_of(reads_tokens(sizes.pass) ? args.rows : args.tokens), sizes.top_k + 3});
  if (args.row_prob)
    result.push_back({values_of(view(args.row_prob, DType::kF32, {sizes.rows})), 0});
  if (args.dprob)
    result.push_back({values_of(view(args.dprob, DType::kF32, {slots})), sizes.hidden + 2});
  return result;
}

template <>
Work work(const PermuteCase& c) {
  const int64_t live = std::min<int64_t>(c.offsets.back(), c.args.rows[0]);
  const double rows = live_bytes(c.args.rows, live) + live_bytes(c.args.row_scales, live);
  const double tokens = bytes_of(c.args.tokens) + bytes_of(c.args.token_scales);
  return {.flops = 0,
          .bytes = rows + tokens + (c.args.y ? rows : 0) + (c.args.addend ? tokens : 0)};
}

}  // namespace cadre::bench
