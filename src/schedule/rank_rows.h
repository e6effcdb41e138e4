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
  /// Of a row of all, chosen with that expert of all: rank * R + its row there, -1: no room.
  CADRE_HD constexpr int32_t row_at_rank(int64_t row, int expert) const {
    const int rank = expert / experts;
    const int64_t there = row - first(rank);
    return there < bound ? int32_t(rank * bound + there) : -1;
  }
};

}  // namespace cadre::schedule
