// Counts of all ranks: how a dispatch by the caller's engine brings them to the host, and what the
// host makes of them.
#include <algorithm>

#include "parallel/collective_passage.h"

namespace cadre::parallel {

constexpr auto kWord = int64_t(sizeof(int32_t));

void Passage::gather_counts(const CollectiveDispatchArgs& args) const {
  const HostLists& host = state.host;
  state.link->await();  // the copies of the dispatch before
  auto* said = list<int32_t>(memory_.said);
  const int64_t words = words_said(p) * kWord;
  state.link->copy(said, host.said, words, stream_);
  if (by_token()) state.link->number_tokens(tokens_of(args), stream_);
  const auto gathered = [&](const void* own, int64_t bytes, int64_t to) {
    for (int q = 0; q < p.ranks; ++q)
      state.messages.push_back({own, bytes, base_ + to + q * bytes, bytes});
  };
  const int64_t each = (int64_t(p.ranks) * p.experts + 1) * kWord;
  state.messages.clear();
  gathered(by_token() ? list<int32_t>(memory_.row_offsets) : map_.leaving, each, memory_.counts);
  gathered(said, words, memory_.heard);
  state.all_to_all(state.messages, stream_);
  state.link->copy(host.heard, base_ + memory_.heard, p.ranks * words, stream_);
  state.link->copy(host.counts, base_ + memory_.counts, p.ranks * each, stream_);
}

void Passage::check_words() const {
  const int32_t problem = state.words_of(0).problem;
  for (int q = 0; q < p.ranks; ++q) {
    const RankWords words = state.words_of(q);
    if (words.problem != problem) throw problem_error(p, state.rank, q);
    if (words.rank != q) throw number_error(p, q, words.rank);
  }
}

void Passage::count_rows(int32_t* routed) const {
  const schedule::RankCounts all = state.counts();
  const CountLists::Parts& rows = counts.rows;
  std::fill_n(rows.received, p.ranks, 0);
  all.each_run(state.rank,
               [&](const schedule::RankRun& run) { rows.received[run.from] += run.count; });
  rows.first[0] = 0;
  int fullest = 0;
  for (int q = 0; q < p.ranks; ++q) {
    rows.sent[q] = 0;
    rows.first[q + 1] = rows.first[q] + all.routed(state.rank, q);
    all.each_run(q, [&](const schedule::RankRun& run) {
      if (run.from == state.rank) rows.sent[q] += run.count;
    });
    if (all.routed(q) > all.routed(fullest)) fullest = q;
    if (routed != nullptr) routed[q] = int32_t(all.routed(q));
  }
  const int64_t most = all.routed(fullest);
  *counts.overflowed = p.overflow == Overflow::kError && most > p.rows;
  if (overflowed()) state.fullest = fullest, state.routed = most;
}

/// The first rows for a rank need the first tokens for it: no more tokens than rows with room.
void Passage::count_tokens() const {
  const auto all = [&](int from, int at) {
    return by_token() ? state.words_of(from).tokens[at] : state.counts().routed(from, at);
  };
  const CountLists::Parts &rows = counts.rows, &tokens = counts.tokens;
  tokens.first[0] = 0;
  for (int q = 0; q < p.ranks; ++q) {
    const int64_t own = all(state.rank, q);
    tokens.first[q + 1] = tokens.first[q] + own;
    tokens.sent[q] = std::min<int64_t>(own, rows.sent[q]);
    tokens.received[q] = std::min<int64_t>(all(q, state.rank), rows.received[q]);
  }
}

/// Of rows that come by rank, each rank's by expert.
void Passage::order_rows() const {
  const HostLists& host = state.host;
  std::vector<int64_t>& next = state.next;
  next[0] = 0;
  for (int q = 1; q < p.ranks; ++q)
    next[size_t(q)] = next[size_t(q) - 1] + counts.rows.received[q - 1];
  int64_t rows = 0;
  std::fill_n(host.offsets, p.experts + 1, 0);
  state.counts().each_run(state.rank, [&](const schedule::RankRun& run) {
    int64_t& from = next[size_t(run.from)];
    for (int64_t i = 0; i < run.count; ++i) {
      host.came_at[run.first + i] = int32_t(from + i);
      host.row_at[from + i] = int32_t(run.first + i);
    }
    from += run.count;
    rows = run.first + run.count;
    host.offsets[run.expert + 1] = int32_t(rows);
  });
  state.link->copy(map_.came_at, host.came_at, rows * kWord, stream_);
  state.link->copy(map_.row_at, host.row_at, rows * kWord, stream_);
  state.link->copy(map_.offsets, host.offsets, (int64_t(p.experts) + 1) * kWord, stream_);
}

}  // namespace cadre::parallel
