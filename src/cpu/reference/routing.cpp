#include "cpu/reference/routing.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/row_map.h"
#include "cpu/load_store.h"
#include "cpu/reference/offsets.h"

namespace cadre::cpu::reference {
namespace {

constexpr double kLowest = -std::numeric_limits<double>::infinity();
constexpr double kTiny = 1e-20;  // keeps a sum of probabilities above 0

/// What is worked out for one token; every array is [E].
struct Token {
  double *logit, *score, *rank, *gradient;

  Token(const RoutingProblem& p, Workspace workspace)
      : logit(static_cast<double*>(workspace.data)),
        score(logit + p.experts),
        rank(score + p.experts),
        gradient(rank + p.experts) {}
};

/// e^(l - max): equal infinities count as equal.
double weight(double logit, double max) { return logit == max ? 1.0 : std::exp(logit - max); }

void find_scores(const RoutingProblem& p, const RoutingArgs& args, int64_t t, const Token& token) {
  double max = kLowest, sum = 0;
  for (int e = 0; e < p.experts; ++e) {
    const double logit = read(args.logits, t, e);
    token.logit[e] = std::isnan(logit) ? kLowest : logit;
    max = std::max(max, token.logit[e]);
  }
  for (int e = 0; e < p.experts; ++e) sum += weight(token.logit[e], max);
  for (int e = 0; e < p.experts; ++e)
    token.score[e] = p.score == RoutingScore::kSigmoid ? 1 / (1 + std::exp(-token.logit[e]))
                                                       : weight(token.logit[e], max) / sum;
}

void find_ranks(const RoutingProblem& p, const RoutingArgs& args, const Token& token) {
  for (int e = 0; e < p.experts; ++e) {
    const double plain = p.score == RoutingScore::kTopKSoftmax ? token.logit[e] : token.score[e];
    const double rank = plain + (p.expert_bias ? args.expert_bias[e] : 0.0);
    token.rank[e] = std::isnan(rank) ? kLowest : rank;
  }
}

bool is_among(const int32_t* list, int count, int number) {
  return std::find(list, list + count, number) != list + count;
}

/// The best expert in [first, last) that is not among the `count` chosen; there is one.
int best(const Token& token, int first, int last, const int32_t* chosen, int count) {
  int found = -1;
  for (int e = first; e < last; ++e) {
    if (is_among(chosen, count, e)) continue;
    const bool better = found < 0 || token.rank[e] > token.rank[found] ||
                        (token.rank[e] == token.rank[found] && token.logit[e] > token.logit[found]);
    if (better) found = e;
  }
  return found;
}

/// The sum of the best ranks of a group, in descending order; `list` is scratch.
double group_sum(const RoutingProblem& p, const Token& token, int group, int32_t* list) {
  const int size = p.experts / p.groups, wanted = std::max(1, p.top_k / p.group_top_k);
  double sum = 0;
  for (int i = 0; i < wanted; ++i) {
    list[i] = best(token, group * size, (group + 1) * size, list, i);
    sum += token.rank[list[i]];
  }
  return sum;
}

/// True if fewer than group_top_k groups have a greater sum, or an equal one and a lower number.
bool is_kept(const RoutingProblem& p, const double* sums, int group) {
  int before = 0;
  for (int other = 0; other < p.groups; ++other)
    before += sums[other] > sums[group] || (sums[other] == sums[group] && other < group);
  return before < p.group_top_k;
}

/// Writes the token's experts, best first.
void choose(const RoutingProblem& p, const Token& token, int32_t* chosen) {
  double* sums = token.gradient;  // not in use here
  for (int g = 0; g < p.groups; ++g) sums[g] = group_sum(p, token, g, chosen);
  const int size = p.experts / p.groups;
  for (int j = 0; j < p.top_k; ++j) {
    int found = -1;
    for (int g = 0; g < p.groups; ++g) {
      if (!is_kept(p, sums, g)) continue;
      const int e = best(token, g * size, (g + 1) * size, chosen, j);
      const bool better =
          e >= 0 && (found < 0 || token.rank[e] > token.rank[found] ||
                     (token.rank[e] == token.rank[found] && token.logit[e] > token.logit[found]));
      if (better) found = e;
    }
    chosen[j] = found;
  }
}

bool is_expert(const RoutingProblem& p, int32_t e) { return e >= 0 && e < p.experts; }

/// q[j] of the header, 0 for what is no expert.
double plain_prob(const RoutingProblem& p, const Token& token, const int32_t* chosen, int j) {
  if (!is_expert(p, chosen[j])) return 0;
  if (p.score != RoutingScore::kTopKSoftmax) return token.score[chosen[j]];
  double max = kLowest, sum = 0;
  for (int i = 0; i < p.top_k; ++i)
    if (is_expert(p, chosen[i])) max = std::max(max, token.logit[chosen[i]]);
  for (int i = 0; i < p.top_k; ++i)
    if (is_expert(p, chosen[i])) sum += weight(token.logit[chosen[i]], max);
  return weight(token.logit[chosen[j]], max) / sum;
}

double norm(const RoutingProblem& p, const Token& token, const int32_t* chosen) {
  double sum = kTiny;
  for (int j = 0; j < p.top_k; ++j) sum += plain_prob(p, token, chosen, j);
  return p.normalize ? sum : 1.0;
}

void forward(const RoutingProblem& p, const RoutingArgs& args, int64_t t, const Token& token) {
  int32_t* chosen = args.experts + t * p.top_k;
  find_scores(p, args, t, token);
  find_ranks(p, args, token);
  choose(p, token, chosen);
  for (int j = 0; j < p.top_k; ++j)
    args.prob[t * p.top_k + j] =
        float(p.scale * plain_prob(p, token, chosen, j) / norm(p, token, chosen));
  if (args.scores != nullptr) std::copy_n(token.score, p.experts, args.scores + t * p.experts);
}

/// The gradient of q[j]: of scale * q[j] / norm, where norm is the sum of all q if normalised.
double plain_prob_gradient(const RoutingProblem& p, const RoutingArgs& args, int64_t t,
                           const Token& token, int j) {
  const int32_t* chosen = args.experts + t * p.top_k;
  const float* dprob = args.dprob + t * p.top_k;
  const double sum = norm(p, token, chosen);
  double through_norm = 0;
  for (int i = 0; i < p.top_k && p.normalize; ++i)
    if (is_expert(p, chosen[i])) through_norm += dprob[i] * plain_prob(p, token, chosen, i) / sum;
  return p.scale * (dprob[j] - through_norm) / sum;
}

void backward(const RoutingProblem& p, const RoutingArgs& args, int64_t t, const Token& token) {
  const int32_t* chosen = args.experts + t * p.top_k;
  find_scores(p, args, t, token);
  double* dscore = token.gradient;
  double* dlogit = token.rank;  // not in use here
  for (int e = 0; e < p.experts; ++e) {
    dscore[e] = args.dscores != nullptr ? args.dscores[t * p.experts + e] : 0;
    dlogit[e] = 0;
  }
  double chosen_mean = 0;
  for (int j = 0; j < p.top_k; ++j)
    if (is_expert(p, chosen[j]))
      chosen_mean += plain_prob_gradient(p, args, t, token, j) * plain_prob(p, token, chosen, j);
  for (int j = 0; j < p.top_k; ++j) {
    if (!is_expert(p, chosen[j])) continue;
    const double dq = plain_prob_gradient(p, args, t, token, j);
    if (p.score == RoutingScore::kTopKSoftmax)
      dlogit[chosen[j]] += plain_prob(p, token, chosen, j) * (dq - chosen_mean);
    else
      dscore[chosen[j]] += dq;
  }
  double mean = 0;
  for (int e = 0; e < p.experts; ++e) mean += dscore[e] * token.score[e];
  for (int e = 0; e < p.experts; ++e) {
    const double s = token.score[e];
    dlogit[e] +=
        p.score == RoutingScore::kSigmoid ? dscore[e] * s * (1 - s) : s * (dscore[e] - mean);
    write(args.dlogits, {t, e}, dlogit[e]);
  }
}

}  // namespace

int64_t routing_workspace_bytes(const RoutingProblem& p, const Device&) {
  return 4 * int64_t(p.experts) * int64_t(sizeof(double));
}

void routing(const RoutingPlan& plan, const RoutingArgs& args, Workspace workspace, Stream stream) {
  const RoutingProblem& p = plan.problem;
  const Token token(p, workspace);
  for (int64_t t = 0; t < p.tokens; ++t)
    p.backward ? backward(p, args, t, token) : forward(p, args, t, token);
  if (p.map) offsets(backend::row_map_plan(plan), backend::row_map_args(args), workspace, stream);
}

}  // namespace cadre::cpu::reference
