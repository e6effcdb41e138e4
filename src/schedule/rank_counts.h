#pragma once
#include <algorithm>
#include <cstdint>

// Rows of one rank, from how many the tokens of every rank have for every expert.
namespace cadre::schedule {

/// Rows of one expert that are of one rank's tokens; they lie together.
struct RankRun {
  int expert = 0;     ///< of E
  int from = 0;       ///< the rank of the tokens
  int64_t first = 0;  ///< row here
  int64_t count = 0;  ///< for which there is room
};

struct RankCounts {
  const int32_t* offsets = nullptr;  ///< [P, P * E + 1]: of each rank's rows, among all experts
  int ranks = 1;                     ///< P
  int experts = 1;                   ///< E
  int64_t bound = 0;                 ///< R: rows for which a rank has room

  /// Rows that the tokens of a rank have at another, before any is dropped.
  int64_t routed(int from, int at) const {
    const int32_t* own = of(from) + int64_t(at) * experts;
    return own[experts] - own[0];
  }
  int64_t routed(int at) const {
    int64_t rows = 0;
    for (int from = 0; from < ranks; ++from) rows += routed(from, at);
    return rows;
  }
  /// Calls visit(RankRun) with all runs of a rank, in the order of its rows: (expert, rank). So
  /// what has no room are the last rows of each rank's, whatever their experts.
  template <class Visit>
  void each_run(int at, Visit&& visit) const {
    int64_t row = 0;
    for (int e = 0; e < experts; ++e)
      for (int from = 0; from < ranks; ++from) {
        const int32_t* end = of(from) + int64_t(at) * experts + e + 1;
        const int64_t count = std::min<int64_t>(end[0] - end[-1], bound - row);
        visit(RankRun{e, from, row, count});
        row += count;
      }
  }

 private:
  const int32_t* of(int from) const { return offsets + from * (int64_t(ranks) * experts + 1); }
};

}  // namespace cadre::schedule
