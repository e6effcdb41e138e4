#include <algorithm>
#include <cmath>

#include "bench/cases/parts.h"
#include "bench/element.h"

namespace cadre::bench {
namespace {

using Problem = RoutingProblem;
using RoutingCase = Case<RoutingProblem>;

constexpr int64_t kScoreRoundings = 64;  // of exp and its argument, the bias and the factors

// Scores of one token in double, and the sum of the chosen ones.
struct Token {
  std::vector<double> scores;
  double chosen_sum = 0;
};

Token score(const RoutingCase& c, int64_t t) {
  const Problem& p = c.problem;
  Token token;
  double sum = 0;
  for (int64_t e = 0; e < p.experts; ++e) {
    const double x = load(c.args.logits, t * c.args.logits.stride[0] + e);
    token.scores.push_back(p.score == RoutingScore::kSigmoid ? 1 / (1 + std::exp(-x))
                                                             : std::exp(x));
    sum += token.scores.back();
  }
  if (p.score != RoutingScore::kSigmoid)
    for (double& s : token.scores) s /= sum;
  for (int64_t j = 0; j < p.top_k; ++j)
    token.chosen_sum += token.scores[size_t(c.args.experts[t * p.top_k + j])];
  return token;
}

// Sizes of the terms that make up dlogits of one token.
void add_gradient(const RoutingCase& c, int64_t t, std::vector<float>& sizes) {
  const Problem& p = c.problem;
  const Token token = score(c, t);
  const bool divided = p.normalize || p.score == RoutingScore::kTopKSoftmax;
  const double den = divided ? token.chosen_sum : 1, factor = std::abs(double(p.scale)) / den;
  std::vector<double> d(token.scores.size(), 0);
  if (c.args.dscores)
    for (size_t e = 0; e < d.size(); ++e)
      d[e] = std::abs(c.args.dscores[t * p.experts + int64_t(e)]);
  double shared = 0;
  const int32_t* chosen = c.args.experts + t * p.top_k;
  for (int64_t j = 0; j < p.top_k; ++j)
    shared += std::abs(c.args.dprob[t * p.top_k + j]) * token.scores[size_t(chosen[j])] / den;
  for (int64_t j = 0; j < p.top_k; ++j)
    d[size_t(chosen[j])] +=
        factor * (std::abs(c.args.dprob[t * p.top_k + j]) + (divided ? shared : 0));
  double mean = 0;
  if (p.score != RoutingScore::kSigmoid)
    for (size_t e = 0; e < d.size(); ++e) mean += token.scores[e] * d[e];
  for (size_t e = 0; e < d.size(); ++e)
    sizes[size_t(t * p.experts) + e] = float(token.scores[e] * (d[e] + mean));
}

TensorView spread_logits(Buffers& buffers, const Problem& p, uint64_t seed) {
  const TensorView logits = buffers.tensor(p.logits, {p.tokens, p.experts});
  fill_normal(logits, p.tokens, seed, 2);
  return logits;
}

void give_map(Buffers& buffers, const Problem& p, RoutingArgs& args) {
  const int64_t chosen = p.tokens * p.top_k;
  args.offsets = buffers.array<int32_t>(p.experts + 1);
  args.map = {buffers.array<int32_t>(chosen), buffers.array<int32_t>(chosen)};
  if (p.row_prob) args.row_prob = buffers.array<float>(chosen);
}

}  // namespace

template <>
RoutingCase make_case(const RoutingProblem& p, const Draw& draw) {
  auto c = new_case<RoutingCase>(p, draw);
  Seeds seeds(draw);
  Buffers& buffers = *c.buffers;
  const int64_t chosen = p.tokens * p.top_k, all = p.tokens * p.experts;
  c.args.logits = spread_logits(buffers, p, seeds.next());
  if (p.expert_bias)
    c.args.expert_bias = random_floats(buffers, p.experts, p.experts, seeds.next());
  c.args.experts = buffers.array<int32_t>(chosen);
  c.args.prob = buffers.array<float>(chosen);
  c.args.scores = buffers.array<float>(all);
  if (p.backward) {
    Problem forward = p;
    forward.backward = false;
    run_on_cpu(forward, c.args);
    c.args.expert_bias = nullptr;
    c.args.prob = c.args.scores = nullptr;
    c.args.dprob = random_floats(buffers, chosen, chosen, seeds.next());
    c.args.dscores = random_floats(buffers, all, all, seeds.next());
    c.args.dlogits = buffers.tensor(p.logits, {p.tokens, p.experts});
    c.outputs.push_back({"dlogits", c.args.dlogits, p.tokens});
    return c;
  }
  const auto add = [&](const char* name, const void* data, DType dtype, int64_t rows,
                       int64_t columns) {
    c.outputs.push_back(
        {name, view(data, dtype, {rows, columns}), rows, Tail::kKeep, dtype == DType::kI32});
  };
  add("experts", c.args.experts, DType::kI32, p.tokens, p.top_k);
  add("prob", c.args.prob, DType::kF32, p.tokens, p.top_k);
  add("scores", c.args.scores, DType::kF32, p.tokens, p.experts);
  if (!p.map) return c;
  give_map(buffers, p, c.args);
  add("offsets", c.args.offsets, DType::kI32, p.experts + 1, 1);
  add("row_of", c.args.map.row_of, DType::kI32, p.tokens, p.top_k);
  add("slot_of", c.args.map.slot_of, DType::kI32, chosen, 1);
  if (p.row_prob) add("row_prob", c.args.row_prob, DType::kF32, chosen, 1);
  return c;
}

template <>
int64_t shrink(RoutingProblem& p) {
  scale(p.tokens, affordable(p.tokens, p.experts, kElementsOfASecond));
  return p.tokens;
}

template <>
std::vector<Magnitude> magnitudes(const RoutingCase& c) {
  const Problem& p = c.problem;
  if (p.backward) {
    std::vector<float> sizes(size_t(p.tokens * p.experts));
#pragma omp parallel for
    for (int64_t t = 0; t < p.tokens; ++t) add_gradient(c, t, sizes);
    return {{std::move(sizes), 4 * kScoreRoundings + 2 * int64_t(p.experts)}};
  }
  // Every result is a product and quotient of positive numbers: its own size is that of its terms.
  Buffers buffers;
  RoutingArgs args = c.args;
  args.experts = buffers.array<int32_t>(p.tokens * p.top_k);
  args.prob = buffers.array<float>(p.tokens * p.top_k);
  args.scores = buffers.array<float>(p.tokens * p.experts);
  if (p.map) give_map(buffers, p, args);
  run_on_cpu(p, args, "cpu_reference");
  const int64_t roundings = kScoreRoundings + p.experts;
  std::vector<Magnitude> sizes(c.outputs.size());
  sizes[1] = {values_of(absolute(buffers, view(args.prob, DType::kF32, {p.tokens, p.top_k}))),
              roundings};
  sizes[2] = {values_of(view(args.scores, DType::kF32, {p.tokens, p.experts})), roundings};
  if (p.row_prob)
    sizes.back() = {
        values_of(absolute(buffers, view(args.row_prob, DType::kF32, {p.tokens * p.top_k, 1}))),
        roundings};
  return sizes;
}

template <>
Work work(const RoutingCase& c) {
  const Problem& p = c.problem;
  const double chosen = double(p.tokens * p.top_k) * (8 + (p.map ? 8 : 0) + (p.row_prob ? 8 : 0));
  return {.flops = 0,
          .bytes = (p.backward ? 2 : 1) * bytes_of(c.args.logits) + chosen +
                   double(p.tokens * p.experts) * 4};
}

}  // namespace cadre::bench
