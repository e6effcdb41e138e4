#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "cadre/collective.h"
#include "cadre/error.h"
#include "parallel/host_link.h"
#include "schedule/host_relays.h"
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

/// Whether tokens cross once to each rank; and to hosts first, where these say something that ranks
/// do not. It follows from the problem, so ranks agree.
bool crosses_by_token(const ExpertParallelProblem&);
constexpr bool crosses_by_host(const ExpertParallelProblem& p) {
  return p.cross == Crossing::kHost && p.host_ranks > 1 && p.host_ranks < p.ranks;
}
constexpr schedule::HostRelays relays_of(const ExpertParallelProblem& p) {
  return {p.ranks, crosses_by_host(p) ? p.host_ranks : p.ranks};
}

/// Elements of these lists of CollectiveMap.
int64_t counts_of_map(const ExpertParallelProblem&);
int64_t passing_of_map(const ExpertParallelProblem&);

/// Words that a rank says to all. Without block as many however tokens cross, so that ranks which
/// differ in that find out: hosts are at most as many as ranks.
constexpr int64_t words_said(const ExpertParallelProblem& p) {
  return int64_t(schedule::RowBlocks::kNameWords) + (p.block > 0 ? 1 : 2) * int64_t(p.ranks);
}

/// The workspace of an exchange, in bytes from its start.
struct CollectiveMemory {
  int64_t leaving = 0;          ///< rows [.., H] in the order of all experts, or in blocks
  int64_t leaving_prob = 0;     ///< [..] fp32
  int64_t coming = 0;           ///< rows [.., H] by rank
  int64_t coming_prob = 0;      ///< [..] fp32
  int64_t said = 0, heard = 0;  ///< [W], [P, W] int32 of W = words_said(): see RankWords,
                                ///< schedule::RowBlocks
  int64_t sorted = 0;           ///< with block: see schedule::RowBlocks
  int64_t leaving_experts = 0, coming_experts = 0;    ///< [P * N] int32, likewise
  int64_t counts = 0;                                 ///< [P, P * E + 1] int32: of every rank
  int64_t row_offsets = 0, firsts = 0, token_of = 0;  ///< by token: see schedule::LeavingTokens
  int64_t leaving_back = 0, coming_back = 0;          ///< [T * top_k], [R] int32, likewise
  int64_t arriving = 0;                               ///< by host: [rounds, T, H], by sender
  int64_t token_offsets = 0, host_firsts = 0;         ///< by host: see schedule::LeavingTokens
  int64_t host_token_of = 0, host_number = 0;         ///< likewise
  int64_t scratch = 0, scratch_bytes = 0;             ///< of the sort
  int64_t bytes = 0;

  /// `offsets`: choices_plan().
  CollectiveMemory(const ExpertParallelProblem&, const OffsetsPlan& offsets);

 private:
  void take_counts(const ExpertParallelProblem&);
  void take_tokens(const ExpertParallelProblem&);
  void take_hosts(const ExpertParallelProblem&);
  void take_blocks(const ExpertParallelProblem&);
  int64_t take(int64_t size);
};

/// What a rank says to all: by what they find out that they differ, and its tokens.
struct RankWords {
  int32_t problem = 0;  ///< ExpertParallelPlan::tag
  int32_t rank = 0;
  const int32_t* tokens = nullptr;  ///< [P]: by token, those for each rank, without regard to room
  const int32_t* for_hosts = nullptr;  ///< by host, likewise

  RankWords(const int32_t* words, int ranks)
      : problem(words[0]),
        rank(words[1]),
        tokens(words + schedule::RowBlocks::kNameWords),
        for_hosts(tokens + ranks) {}
};

/// The same numbers on the host, and what it makes of them. With block there is a note alone.
struct HostLists {
  int32_t *heard = nullptr, *said = nullptr;
  int32_t* counts = nullptr;
  int32_t *came_at = nullptr, *row_at = nullptr;  ///< [R]
  int32_t* offsets = nullptr;                     ///< [E + 1]
  int32_t* passing = nullptr;                     ///< by host: [rounds, 2], of CollectiveMap
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
  PermutePlan pass{};               ///< by host: of a rank's tokens, those for each rank here

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
  /// What travels between ranks: from each, to each, and the first of these, [P], [P], [P + 1].
  struct Parts {
    int64_t *received, *sent, *first;
  };
  Parts rows, tokens;  ///< what crosses to experts are tokens; by choice each row is one
  int64_t* overflowed;
  int64_t ranks;

  CountLists(int64_t* counts, int64_t of)
      : rows{parts(counts, of)},
        tokens{parts(rows.first + of + 1, of)},
        overflowed(tokens.first + of + 1),
        ranks(of) {}

  /// By host: tokens that cross to a host, by its relay.
  Parts for_hosts() const { return parts(overflowed + 1, ranks); }
  /// By host: what is passed on in a round, to each rank of this host, and the first of these.
  struct Passed {
    int64_t *sent, *first;
  };
  Passed passed(int64_t round) const {
    int64_t* sent = for_hosts().first + ranks + 1 + 2 * ranks * round;
    return {sent, sent + ranks};
  }

 private:
  static Parts parts(int64_t* at, int64_t of) { return {at, at + of, at + 2 * of}; }
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
  schedule::HostRelays relays;
  int rounds = relays.rounds();  ///< by host: exchanges in which tokens are passed on
  std::vector<int> round_of{};   ///< [P] by host: when tokens of each are passed on here
  int fullest = -1;              ///< of an overflow: the rank with most rows
  int64_t routed = 0;            ///< its rows
  bool was_recorded = false;     ///< a dispatch with block, into a graph

  schedule::RankCounts counts() const {
    return {host.counts, plan.problem.ranks, plan.problem.experts, plan.problem.rows};
  }
  /// What a rank has said, with the others.
  parallel::RankWords words_of(int of) const {
    const int64_t words = parallel::words_said(plan.problem);
    return {host.heard + of * words, plan.problem.ranks};
  }
  /// Throws once what overflowed.
  void check_overflow();
  /// With block what the last dispatches noted, on whichever rank; all that are over.
  void check_note();
};

}  // namespace cadre
