#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "cadre/collective.h"
#include "cadre/error.h"
#include "parallel/host_link.h"
#include "schedule/rank_counts.h"

namespace cadre::parallel {

/// Of the choices of one rank's tokens, among all experts.
OffsetsPlan choices_plan(const ExpertParallelProblem&, const Device&);

/// With block: of the experts at the places of the blocks that came.
OffsetsPlan arrivals_plan(const ExpertParallelProblem&, const Device&);

/// Rows that leave and that come, at most: T * top_k and R, or the places of the blocks, P * N.
constexpr int64_t leaving_rows(const ExpertParallelProblem& p) {
  return p.block > 0 ? p.ranks * p.block : p.tokens * p.top_k;
}
constexpr int64_t coming_rows(const ExpertParallelProblem& p) {
  return p.block > 0 ? p.ranks * p.block : p.rows;
}

/// The workspace of an exchange, in bytes from its start.
struct CollectiveMemory {
  int64_t leaving = 0;       ///< rows [.., H] in the order of all experts, or in blocks
  int64_t leaving_prob = 0;  ///< [..] fp32
  int64_t coming = 0;        ///< rows [.., H] by rank
  int64_t coming_prob = 0;   ///< [..] fp32
  int64_t sorted = 0, said = 0, heard = 0;          ///< with block: see schedule::RowBlocks
  int64_t leaving_experts = 0, coming_experts = 0;  ///< [P * N] int32, likewise
  int64_t counts = 0;                               ///< [P, P * E + 1] int32: offsets of every rank
  int64_t names = 0;                                ///< [P] RankName
  int64_t own_name = 0;                             ///< RankName
  int64_t scratch = 0, scratch_bytes = 0;           ///< of the sort
  int64_t bytes = 0;

  /// `offsets`: choices_plan().
  CollectiveMemory(const ExpertParallelProblem&, const OffsetsPlan& offsets);

 private:
  void take_counts(const ExpertParallelProblem&);
  void take_blocks(const ExpertParallelProblem&);
  int64_t take(int64_t size);
};

/// By what ranks find out that they differ.
struct RankName {
  int32_t problem = 0;  ///< ExpertParallelPlan::tag
  int32_t rank = 0;
};

/// The same numbers on the host, and what it makes of them. With block there is a note alone.
struct HostLists {
  RankName *names = nullptr, *own_name = nullptr;
  int32_t* counts = nullptr;
  int32_t *came_at = nullptr, *row_at = nullptr;  ///< [R]
  int32_t* offsets = nullptr;                     ///< [E + 1]
  schedule::BlockNote* note = nullptr;

  HostLists(const ExpertParallelProblem&, char* memory);
  static int64_t bytes(const ExpertParallelProblem&);
};

/// Steps between a rank's tokens, rows that leave, rows that come, and rows in order.
struct CollectiveSteps {
  OffsetsPlan arrive{};  ///< with block: arrivals_plan()
  PermutePlan leave;     ///< rows that leave from tokens
  PermutePlan leave_with_prob;
  PermutePlan place, go_back;  ///< rows in order from those that came; the other way
  PermutePlan place_with_prob, go_back_with_prob;
  PermutePlan sum, sum_with_dprob;  ///< of rows that are back, for each token

  CollectiveSteps(const ExpertParallelProblem&, const Device&);
};

/// What a rank that differs from the others is told in, of any rank.
DeviceError problem_error(const ExpertParallelProblem&, int rank, int other);
DeviceError number_error(const ExpertParallelProblem&, int rank, int says);

/// The four exchanges with block; the arguments are good.
void dispatch_blocks(const Collective&, const CollectiveDispatchArgs&, Workspace, Stream);
void collect_blocks(const Collective&, const CollectiveCollectArgs&, Workspace, Stream);
void collect_backward_blocks(const Collective&, const CollectiveCollectBackwardArgs&, Workspace,
                             Stream);
void dispatch_backward_blocks(const Collective&, const CollectiveDispatchBackwardArgs&, Workspace,
                              Stream);

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
  parallel::CollectiveMemory memory;
  parallel::CollectiveSteps steps;
  std::unique_ptr<parallel::HostLink> link;
  parallel::HostLists host;
  std::vector<RankMessage> messages{};  ///< 4 * P at most: of four tensors
  std::vector<int64_t> next;            ///< [P]: the next row that came from each rank
  int fullest = -1;                     ///< of an overflow: the rank with most rows
  int64_t routed = 0;                   ///< its rows
  bool was_recorded = false;            ///< a dispatch with block, into a graph

  schedule::RankCounts counts() const {
    return {host.counts, plan.problem.ranks, plan.problem.experts, plan.problem.rows};
  }
  /// Throws once what overflowed.
  void check_overflow();
  /// With block what the last dispatches noted, on whichever rank; all that are over.
  void check_note();
};

}  // namespace cadre
