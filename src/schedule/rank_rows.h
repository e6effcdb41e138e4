#pragma once
#include <cstdint>

#include "cadre/host_device.h"
#include "schedule/expert_rows.h"

// Rows of all ranks, sorted by expert, and those of one rank. `offsets` are of all P * E experts,
// of which rank p has E in a row; so a rank's rows are a range.
namespace cadre::schedule {

struct RankRows {
  const int32_t* offsets = nullptr;  ///< [P * E + 1], good ones
  int experts = 1;                   ///< E
  int64_t bound = 0;                 ///< R: rows for which a rank has room

  CADRE_HD constexpr int64_t first(int rank) const { return offsets[int64_t(rank) * experts]; }
  /// Rows routed to a rank, those beyond R too.
  CADRE_HD constexpr int64_t routed(int rank) const { return first(rank + 1) - first(rank); }
  /// A rank's own offsets.
  CADRE_HD constexpr int32_t offset(int rank, int expert) const {
    const int64_t row = offsets[int64_t(rank) * experts + expert] - first(rank);
    return int32_t(row < bound ? row : bound);
  }
  /// The first of the ranks to which most rows are routed.
  CADRE_HD constexpr int fullest(int ranks) const {
    int most = 0;
    for (int q = 1; q < ranks; ++q)
      if (routed(q) > routed(most)) most = q;
    return most;
  }
  /// Of a row of all, chosen with that expert of all: rank * R + its row there, -1: no room.
  CADRE_HD constexpr int32_t row_at_rank(int64_t row, int expert) const {
    const int rank = expert / experts;
    const int64_t there = row - first(rank);
    return there < bound ? int32_t(rank * bound + there) : -1;
  }
  /// The same, and -1 of no row.
  CADRE_HD constexpr int32_t row_at_rank_of(int64_t row, int expert) const {
    return row < 0 ? -1 : row_at_rank(row, expert);
  }
  /// Of a token of `rank` with a row at another, or its own: where the sum of its rows there lies
  /// among the sums of all ranks, [P, P, T].
  CADRE_HD static constexpr int32_t sum_at(int there, int ranks, int rank, int64_t token,
                                           int64_t tokens) {
    return int32_t((int64_t(there) * ranks + rank) * tokens + token);
  }
  /// Of a row of all: which of that rank's it is, -1: none, or no room.
  CADRE_HD constexpr int32_t row_of_rank(int64_t row, int rank) const {
    const int64_t here = row - first(rank);
    return here >= 0 && here < bound && row < first(rank + 1) ? int32_t(here) : -1;
  }
};

}  // namespace cadre::schedule
