#include "bench/rank_routing.h"

#include <algorithm>
#include <span>

namespace cadre::bench {
namespace {

bool is_expert(const ExpertParallelProblem& p, int32_t e) {
  return e >= 0 && e < p.ranks * p.experts;
}

std::span<const int32_t> choices_of_token(const ExpertParallelProblem& p,
                                          const std::vector<int32_t>& experts, int64_t token) {
  return std::span(experts).subspan(size_t(token * p.top_k), size_t(p.top_k));
}

/// How many of these choices are of a rank's experts, or of those of so many ranks from it on.
int64_t choices_of(const ExpertParallelProblem& p, std::span<const int32_t> choices, int rank,
                   int ranks = 1) {
  return std::count_if(choices.begin(), choices.end(), [&](int32_t e) {
    return is_expert(p, e) && e / p.experts >= rank && e / p.experts < rank + ranks;
  });
}

/// Who passes the tokens of a rank on to another: the rank with its place in the host of that one.
int relay(const ExpertParallelProblem& p, int host_ranks, int from, int to) {
  const int begin = to / host_ranks * host_ranks;
  return begin + from % host_ranks % (std::min(begin + host_ranks, p.ranks) - begin);
}

/// Rows that each rank would have of these choices.
std::vector<int64_t> rows_of_ranks(const ExpertParallelProblem& p,
                                   std::span<const int32_t> choices) {
  std::vector<int64_t> rows(size_t(p.ranks), 0);
  for (const int32_t e : choices)
    if (is_expert(p, e)) ++rows[size_t(e / p.experts)];
  return rows;
}

/// Of the rows that these choices make at a rank, those beyond the first `most` are dropped. They
/// stand by expert, then in the order of the choices.
void keep_first(const ExpertParallelProblem& p, int64_t most, std::span<int32_t> choices) {
  std::vector<int64_t> counts(size_t(p.ranks * p.experts), 0), next = counts;
  for (const int32_t e : choices)
    if (is_expert(p, e)) ++counts[size_t(e)];
  for (size_t e = 0; e < counts.size(); ++e)
    next[e] = e % size_t(p.experts) == 0 ? 0 : next[e - 1] + counts[e - 1];
  for (int32_t& e : choices)
    if (is_expert(p, e) && next[size_t(e)]++ >= most) e = -1;
}

/// Tokens that a rank has not are absent. What is beyond a block of a rank does not leave it, and
/// what comes beyond R has no row.
RankRouting finished(const ExpertParallelProblem& p, RankRouting routing) {
  const int64_t each = p.tokens * p.top_k;
  for (int q = 0; q < p.ranks; ++q)
    std::fill(routing.experts.begin() + q * each + routing.tokens[size_t(q)] * p.top_k,
              routing.experts.begin() + (q + 1) * each, -1);
  for (const int64_t rows : rows_of_ranks(p, routing.experts))
    routing.routed.push_back(int32_t(rows));
  routing.kept = routing.experts;
  const std::span<int32_t> kept(routing.kept);
  for (int q = 0; q < p.ranks && p.block > 0; ++q)
    keep_first(p, p.block, kept.subspan(size_t(q * each), size_t(each)));
  keep_first(p, p.rows, kept);
  return routing;
}

}  // namespace

int64_t RankRouting::rows(const ExpertParallelProblem& p, bool of_others) const {
  int64_t rows = 0;
  for (size_t i = 0; i < kept.size(); ++i) {
    const auto home = int64_t(i) / (p.tokens * p.top_k);
    if (is_expert(p, kept[i])) rows += !of_others || kept[i] / p.experts != home;
  }
  return rows;
}

int64_t RankRouting::tokens_of_ranks(const ExpertParallelProblem& p, bool of_others) const {
  int64_t tokens_of_all = 0;
  for (int64_t t = 0; t < p.ranks * p.tokens; ++t)
    for (int q = 0; q < p.ranks; ++q)
      tokens_of_all +=
          (!of_others || q != t / p.tokens) && choices_of(p, choices_of_token(p, kept, t), q) > 0;
  return tokens_of_all;
}

int64_t RankRouting::tokens_sent(const ExpertParallelProblem& p) const {
  const bool by_host = p.cross == Crossing::kHost && p.host_ranks > 1;
  const int host_ranks = by_host ? p.host_ranks : p.ranks;
  int64_t sent = 0;
  for (int from = 0; from < p.ranks; ++from)
    for (int to = 0; to < p.ranks; ++to) {
      int64_t chose = 0, rows = 0;
      for (int64_t t = from * p.tokens; t < (from + 1) * p.tokens; ++t) {
        chose += choices_of(p, choices_of_token(p, experts, t), to) > 0;
        rows += choices_of(p, choices_of_token(p, kept, t), to);
      }
      sent += relay(p, host_ranks, from, to) != to ? std::min(chose, rows) : 0;
    }
  for (int64_t t = 0; t < p.ranks * p.tokens; ++t)
    for (int host = 0; host < p.ranks; host += host_ranks)
      sent += host / host_ranks != t / p.tokens / host_ranks &&
              choices_of(p, choices_of_token(p, experts, t), host, host_ranks) > 0;
  return sent;
}

RankRouting drawn_routing(const ExpertParallelProblem& p, const Draw& draw) {
  const int64_t tokens = p.ranks * p.tokens;
  RankRouting routing{.name = draw.offsets};
  routing.tokens.assign(size_t(p.ranks), p.tokens);
  for (const int64_t e : draw_choices(draw, tokens, p.top_k, p.ranks * p.experts))
    routing.experts.push_back(int32_t(e));
  return finished(p, std::move(routing));
}

std::vector<RankRouting> rank_routings(const ExpertParallelProblem& p, const Draw& draw) {
  std::vector<RankRouting> all = {drawn_routing(p, draw)};
  const RankRouting usual = all[0];
  const auto add = [&](std::string_view name, const auto& change) {
    RankRouting routing{.name = std::string(name), .tokens = usual.tokens};
    routing.experts = usual.experts;
    change(routing);
    all.push_back(finished(p, std::move(routing)));
  };
  add("skewed", [&](RankRouting& r) {
    Draw skewed = draw;
    skewed.offsets = "zipf:1.2";
    r.experts = drawn_routing(p, skewed).experts;
  });
  add("ranks without tokens", [&](RankRouting& r) {
    for (size_t q = 0; q < r.tokens.size(); ++q) r.tokens[q] = q % 2 == 0 ? 0 : p.tokens / 2;
  });
  add("ranks without rows", [&](RankRouting& r) {
    for (int32_t& e : r.experts) e = is_expert(p, e) ? e % p.experts : e;
  });
  add("all to one expert", [&](RankRouting& r) {
    std::fill(r.experts.begin(), r.experts.end(), p.ranks * p.experts - 1);
  });
  add("absent tokens", [&](RankRouting& r) {
    for (size_t i = 0; i < r.experts.size(); ++i)
      if (i / size_t(p.top_k) % 3 != 0) r.experts[i] = -1;
  });
  return all;
}

}  // namespace cadre::bench
