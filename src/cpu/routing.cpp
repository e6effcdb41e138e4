#include "cpu/routing.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "activations/sigmoid.h"
#include "backend/row_map.h"
#include "cpu/clones.h"
#include "cpu/lanes.h"
#include "cpu/load_store.h"
#include "cpu/offsets.h"
#include "cpu/threads.h"

namespace cadre::cpu {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();
constexpr float kTiny = 1e-20f;  // keeps a sum of probabilities above 0
constexpr int kBlock = 64;       // experts at a time
constexpr int64_t kMostPieces = 64;
constexpr int64_t kCostOfLogit = 8;  // elements of a simple loop

/// Tokens are cut into pieces, each with scratch of its own; how many there are does not depend on
/// the threads.
int64_t pieces(const RoutingProblem& p) { return std::min<int64_t>(p.tokens, kMostPieces); }

constexpr int64_t kArrays = 5;  // of a Token

/// One token: its arrays in the scratch of its piece, each [E], and its row of the choices.
struct Token {
  const RoutingProblem& p;
  float *logit, *score, *rank, *spare, *more_spare;
  int32_t* chosen;

  Token(const RoutingProblem& problem, const RoutingArgs& args, float* scratch, int64_t t)
      : p(problem),
        logit(scratch),
        score(logit + p.experts),
        rank(score + p.experts),
        spare(rank + p.experts),
        more_spare(spare + p.experts),
        chosen(args.experts + t * p.top_k) {}

  bool is_expert(int j) const { return chosen[j] >= 0 && chosen[j] < p.experts; }
};

/// e^(l - max): equal infinities count as equal.
float weight(float logit, float max) {
  return logit == max ? 1.0f : activations::exp_of(logit - max);
}

/// The sum of values[e] * factors[e] in a fixed order.
float product(const float* values, const float* factors, int count) {
  Lanes<kBlock> sums{};
  for (int first = 0; first < count; first += kBlock)
    for (int i = 0; i < std::min(kBlock, count - first); ++i)
      sums.at[i] += values[first + i] * factors[first + i];
  return total(sums);
}

CADRE_CLONES void find_scores(const Token& token, const TensorView& logits, int64_t t) {
  const int experts = token.p.experts;
  load_run(token.p.logits)(row_address(logits, t), {0, 1, experts}, token.logit);
  float max = kLowest;
  for (int e = 0; e < experts; ++e) {
    token.logit[e] = std::isnan(token.logit[e]) ? kLowest : token.logit[e];
    max = std::max(max, token.logit[e]);
  }
  if (token.p.score == RoutingScore::kSigmoid) {
    for (int e = 0; e < experts; ++e)
      token.score[e] = activations::Sigmoid<float>(token.logit[e]).value;
    return;
  }
  Lanes<kBlock> sums{};
  for (int first = 0; first < experts; first += kBlock)
    for (int i = 0; i < std::min(kBlock, experts - first); ++i) {
      token.score[first + i] = weight(token.logit[first + i], max);
      sums.at[i] += token.score[first + i];
    }
  const float sum = total(sums);
  for (int e = 0; e < experts; ++e) token.score[e] /= sum;
}

void find_ranks(const Token& token, const float* bias) {
  const float* plain = token.p.score == RoutingScore::kTopKSoftmax ? token.logit : token.score;
  for (int e = 0; e < token.p.experts; ++e) {
    const float rank = plain[e] + (bias != nullptr ? bias[e] : 0.0f);
    token.rank[e] = std::isnan(rank) ? kLowest : rank;
  }
}

/// The best experts so far, in order. Experts must come in ascending number, since a later one goes
/// behind its equals.
struct Best {
  const Token& token;
  int size;
  int32_t* list = token.chosen;
  int count = 0;

  bool better(int a, int b) const {
    return token.rank[a] > token.rank[b] ||
           (token.rank[a] == token.rank[b] && token.logit[a] > token.logit[b]);
  }
  void add(int expert) {
    if (count == size && !better(expert, list[size - 1])) return;
    int place = count < size ? count++ : size - 1;
    for (; place > 0 && better(expert, list[place - 1]); --place) list[place] = list[place - 1];
    list[place] = expert;
  }
  void add_group(int group) {
    const int experts = token.p.experts / token.p.groups;
    for (int e = group * experts; e < (group + 1) * experts; ++e) add(e);
  }
};

/// Writes into `kept` a 1 for each group whose experts may be chosen, else a 0.
void keep_groups(const Token& token, float* kept, float* sums) {
  const RoutingProblem& p = token.p;
  for (int g = 0; g < p.groups; ++g) {
    Best best{.token = token, .size = std::max(1, p.top_k / p.group_top_k)};
    best.add_group(g);
    kept[g] = sums[g] = 0;
    for (int i = 0; i < best.count; ++i) sums[g] += token.rank[best.list[i]];
  }
  for (int taken = 0; taken < p.group_top_k; ++taken) {
    int found = -1;
    for (int g = 0; g < p.groups; ++g)
      if (kept[g] == 0 && (found < 0 || sums[g] > sums[found])) found = g;
    kept[found] = 1;
  }
}

void choose(const Token& token) {
  const RoutingProblem& p = token.p;
  float* kept = token.spare;
  if (p.groups > 1) keep_groups(token, kept, token.more_spare);
  Best best{.token = token, .size = p.top_k};
  for (int g = 0; g < p.groups; ++g)
    if (p.groups == 1 || kept[g] != 0) best.add_group(g);
}

/// q[j] of the header and what it takes to find it; 0 for what is no expert.
struct PlainProb {
  const Token& token;
  float max = kLowest, sum = 0;  ///< of topk_softmax
  float norm = 1;

  explicit PlainProb(const Token& of) : token(of) {
    const RoutingProblem& p = token.p;
    const bool over_chosen = p.score == RoutingScore::kTopKSoftmax;
    for (int j = 0; j < p.top_k && over_chosen; ++j)
      if (token.is_expert(j)) max = std::max(max, token.logit[token.chosen[j]]);
    for (int j = 0; j < p.top_k && over_chosen; ++j)
      if (token.is_expert(j)) sum += weight(token.logit[token.chosen[j]], max);
    if (!p.normalize) return;
    norm = kTiny;
    for (int j = 0; j < p.top_k; ++j) norm += at(j);
  }
  float at(int j) const {
    if (!token.is_expert(j)) return 0;
    const int e = token.chosen[j];
    return token.p.score == RoutingScore::kTopKSoftmax ? weight(token.logit[e], max) / sum
                                                       : token.score[e];
  }
};

void forward(const RoutingProblem& p, const RoutingArgs& args, float* scratch, int64_t t) {
  const Token token(p, args, scratch, t);
  find_scores(token, args.logits, t);
  find_ranks(token, args.expert_bias);
  choose(token);
  const PlainProb q(token);
  for (int j = 0; j < p.top_k; ++j) args.prob[t * p.top_k + j] = p.scale * (q.at(j) / q.norm);
  if (args.scores != nullptr) std::copy_n(token.score, p.experts, args.scores + t * p.experts);
}

/// Adds the gradients of the chosen to dscore, or of topk_softmax to dlogit.
void chosen_gradients(const Token& token, const float* dprob, float* dscore, float* dlogit) {
  const RoutingProblem& p = token.p;
  const PlainProb q(token);
  float through_norm = 0;
  for (int j = 0; j < p.top_k && p.normalize; ++j)
    if (token.is_expert(j)) through_norm += dprob[j] * q.at(j) / q.norm;
  const auto dq = [&](int j) { return p.scale * (dprob[j] - through_norm) / q.norm; };

  float mean = 0;
  for (int j = 0; j < p.top_k; ++j)
    if (token.is_expert(j)) mean += dq(j) * q.at(j);
  for (int j = 0; j < p.top_k; ++j) {
    if (!token.is_expert(j)) continue;
    if (p.score == RoutingScore::kTopKSoftmax)
      dlogit[token.chosen[j]] += q.at(j) * (dq(j) - mean);
    else
      dscore[token.chosen[j]] += dq(j);
  }
}

void backward(const RoutingProblem& p, const RoutingArgs& args, float* scratch, int64_t t) {
  const Token token(p, args, scratch, t);
  find_scores(token, args.logits, t);
  float *dscore = token.spare, *dlogit = token.more_spare;
  if (args.dscores != nullptr)
    std::copy_n(args.dscores + t * p.experts, p.experts, dscore);
  else
    std::fill_n(dscore, p.experts, 0.0f);
  std::fill_n(dlogit, p.experts, 0.0f);
  chosen_gradients(token, args.dprob + t * p.top_k, dscore, dlogit);
  if (p.score == RoutingScore::kSigmoid) {
    for (int e = 0; e < p.experts; ++e) {
      const activations::Sigmoid<float> s(token.logit[e]);
      dlogit[e] += dscore[e] * s.value * s.complement;
    }
  } else {
    const float mean = product(dscore, token.score, p.experts);
    for (int e = 0; e < p.experts; ++e) dlogit[e] += token.score[e] * (dscore[e] - mean);
  }
  store_run(p.logits)(row_address(args.dlogits, t), {0, 1, p.experts}, dlogit);
}

}  // namespace

int64_t routing_workspace_bytes(const RoutingProblem& p, const Device& device) {
  const int64_t own = pieces(p) * kArrays * p.experts * int64_t(sizeof(float));
  return p.map ? std::max(own, offsets_workspace_bytes(backend::row_map_problem(p), device)) : own;
}

void routing(const RoutingPlan& plan, const RoutingArgs& args, Workspace workspace, Stream stream) {
  const RoutingProblem& p = plan.problem;
  const int64_t count = pieces(p);
#pragma omp parallel for schedule(dynamic) if (worth_threads(p.tokens * p.experts * kCostOfLogit))
  for (int64_t piece = 0; piece < count; ++piece) {
    float* scratch = static_cast<float*>(workspace.data) + piece * kArrays * p.experts;
    for (int64_t t = p.tokens * piece / count; t < p.tokens * (piece + 1) / count; ++t)
      p.backward ? backward(p, args, scratch, t) : forward(p, args, scratch, t);
  }
  if (p.map) offsets(backend::row_map_plan(plan), backend::row_map_args(args), workspace, stream);
}

}  // namespace cadre::cpu
