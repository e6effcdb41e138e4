#pragma once
#include <set>
#include <utility>
#include <vector>

#include "tests/parallel/rank_case.h"

namespace cadre::test {

/// What ranks have for each other, or for each host of so many ranks: rows, and tokens that have
/// such rows.
struct Sent {
  std::vector<int64_t> rows, tokens;  ///< [P, P]
  int64_t others = 0;                 ///< tokens for other ranks, or hosts

  explicit Sent(const ExpertParallelProblem& p, const std::vector<RankCase>& ranks, int each = 1)
      : rows(size_t(p.ranks) * size_t(p.ranks)), tokens(rows) {
    for (int from = 0; from < p.ranks; ++from) {
      const std::vector<int32_t>& experts = ranks[size_t(from)].experts;
      std::set<std::pair<int, size_t>> seen;
      for (size_t i = 0; i < experts.size(); ++i) {
        if (experts[i] < 0 || experts[i] >= p.ranks * p.experts) continue;
        const int to = experts[i] / p.experts / each;
        const bool is_new = seen.emplace(to, i / size_t(p.top_k)).second;
        ++rows[size_t(from * p.ranks + to)];
        tokens[size_t(from * p.ranks + to)] += is_new;
        others += is_new && to != from / each;
      }
    }
  }
};

}  // namespace cadre::test
