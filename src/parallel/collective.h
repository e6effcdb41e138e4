#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "cadre/collective.h"
#include "parallel/host_link.h"
#include "schedule/rank_counts.h"

namespace cadre::parallel {

/// Of the choices of one rank's tokens, among all experts.
OffsetsPlan choices_plan(const ExpertParallelProblem&, const Device&);

/// The workspace of an exchange, in bytes from its start.
struct CollectiveMemory {
  int64_t leaving = 0;                     ///< [T * top_k, H]: rows in the order of all experts
  int64_t leaving_prob = 0;                ///< [T * top_k] fp32
  int64_t coming = 0;                      ///< [R, H]: rows by rank
  int64_t coming_prob = 0;                 ///< [R] fp32
  int64_t counts = 0;                      ///< [P, P * E + 1] int32: offsets of every rank
  int64_t names = 0;                       ///< [P] RankName
  int64_t own_name = 0;                    ///< RankName
  int64_t scratch = 0, scratch_bytes = 0;  ///< of the sort
  int64_t bytes = 0;

  CollectiveMemory(const ExpertParallelProblem&, const OffsetsPlan&);
};

/// By what ranks find out that they differ.
struct RankName {
  int32_t problem = 0;  ///< ExpertParallelPlan::tag
  int32_t rank = 0;
};

/// The same numbers on the host, and what it makes of them.
struct HostLists {
  RankName *names, *own_name;
  int32_t* counts;
  int32_t *came_at, *row_at;  ///< [R]
  int32_t* offsets;           ///< [E + 1]

  HostLists(const ExpertParallelProblem&, char* memory);
  static int64_t bytes(const ExpertParallelProblem&);
};

/// Steps between a rank's tokens, rows that leave, rows that come, and rows in order.
struct CollectiveSteps {
  PermutePlan leave;           ///< rows that leave from tokens
  PermutePlan place, go_back;  ///< rows in order from those that came; the other way
  PermutePlan place_with_prob, go_back_with_prob;
  PermutePlan sum, sum_with_dprob;  ///< of rows that are back, for each token

  CollectiveSteps(const ExpertParallelProblem&, const Device&);
};

/// CollectiveMap::counts, by parts.
struct CountLists {
  int64_t *received, *sent, *first;  ///< [P], [P], [P + 1]
  int64_t* overflowed;

  CountLists(int64_t* counts, int ranks)
      : received(counts),
        sent(received + ranks),
        first(sent + ranks),
        overflowed(first + ranks + 1) {}
};

}  // namespace cadre::parallel

namespace cadre {

struct Collective::State {
  State(const ExpertParallelPlan&, int rank, AllToAll);

  ExpertParallelPlan plan;
  int rank;
  AllToAll all_to_all;
  parallel::CollectiveSteps steps;
  std::unique_ptr<parallel::HostLink> link;
  parallel::HostLists host;
  std::vector<RankMessage> messages{};  ///< 2 * P at most: of two tensors
  std::vector<int64_t> next;            ///< [P]: the next row that came from each rank
  int fullest = -1;                     ///< of an overflow: the rank with most rows
  int64_t routed = 0;                   ///< its rows

  schedule::RankCounts counts() const {
    return {host.counts, plan.problem.ranks, plan.problem.experts, plan.problem.rows};
  }
  /// Throws once what overflowed.
  void check_overflow();
};

}  // namespace cadre
