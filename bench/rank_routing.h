#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "bench/draw.h"
#include "cadre/expert_parallel.h"

namespace cadre::bench {

/// Which experts the tokens of all ranks choose. All arrays are as of one rank that has all tokens:
/// rank q's begin at q * T, those beyond its own are absent.
struct RankRouting {
  std::string name{};
  std::vector<int64_t> tokens{};   ///< [P] of each rank, at most T
  std::vector<int32_t> experts{};  ///< [P * T, top_k] of all P * E; -1: absent
  std::vector<int32_t> kept{};     ///< experts, or -1 where a block or a rank has no room
  std::vector<int32_t> routed{};   ///< [P] rows of each rank, those without room too

  /// Rows whose token is of another rank, or of any; of those that have room.
  int64_t rows(const ExpertParallelProblem&, bool of_others) const;
  /// Whether some row has no room.
  bool overflows() const { return kept != experts; }
  /// Tokens once for each other rank, or any, that has rows of them.
  int64_t tokens_of_ranks(const ExpertParallelProblem&, bool of_others) const;
  /// Tokens that an engine moves once to each other rank: those that chose it, no more of one rank
  /// for another than rows that have room. By host: to each other host all that chose it, and from
  /// there to each rank that did not get them so.
  int64_t tokens_sent(const ExpertParallelProblem&) const;
};

/// All tokens choose, as `draw` says.
RankRouting drawn_routing(const ExpertParallelProblem&, const Draw&);

/// That one, and those that are rare: skewed, ranks without tokens, ranks without rows, all to one
/// expert, absent tokens.
std::vector<RankRouting> rank_routings(const ExpertParallelProblem&, const Draw&);

}  // namespace cadre::bench
