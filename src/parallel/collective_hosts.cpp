// Tokens that cross once to each host: to a rank there, their relay, which passes them on to the
// ranks that have rows of them. Where they come, nothing else differs from tokens that cross once
// to each rank.
#include <algorithm>

#include "parallel/collective_passage.h"

namespace cadre::parallel {

constexpr auto kWord = int64_t(sizeof(int32_t));

bool Passage::is_relay_of(int from) const {
  return state.relays.relay(from, own_host()) == state.rank;
}

bool Passage::is_own_relay(int there) const {
  return state.relays.relay(state.rank, state.relays.host_of(there)) == there;
}

int64_t Passage::told_to_host(int from, int host) const {
  const RankWords words = state.words_of(from);
  int64_t tokens = 0;
  for (int r = state.relays.begin(host); r < state.relays.end(host); ++r) tokens += words.tokens[r];
  return tokens;
}

/// All tokens that a rank has for a host cross, though some of their rows may have no room.
void Passage::count_for_hosts() const {
  const CountLists::Parts of = counts.for_hosts();
  const int32_t* own = state.words_of(state.rank).for_hosts;
  of.first[0] = 0;
  for (int q = 0; q < p.ranks; ++q) {
    of.sent[q] = is_own_relay(q) ? own[state.relays.host_of(q)] : 0;
    of.first[q + 1] = of.first[q] + of.sent[q];
    of.received[q] = is_relay_of(q) ? state.words_of(q).for_hosts[own_host()] : 0;
  }
  count_passed();
}

/// What is passed on to a rank is what the tokens' rank would send it: no more tokens than rows
/// with room.
void Passage::count_passed() const {
  int32_t* ends = state.host.passing;
  std::fill_n(ends, 2 * rounds(), 0);
  for (int64_t round = 0; round < rounds(); ++round)
    std::fill_n(counts.passed(round).sent, 2 * p.ranks, 0);
  for (int r = state.relays.begin(own_host()); r < state.relays.end(own_host()); ++r) {
    std::fill(state.next.begin(), state.next.end(), 0);
    state.counts().each_run(
        r, [&](const schedule::RankRun& run) { state.next[size_t(run.from)] += run.count; });
    for (int q = 0; q < p.ranks; ++q) {
      if (!is_relay_of(q)) continue;
      const int round = state.round_of[size_t(q)];
      const CountLists::Passed of = counts.passed(round);
      const int32_t told = state.words_of(q).tokens[r];
      of.first[r] = ends[2 * round + 1];
      of.sent[r] = std::min<int64_t>(told, state.next[size_t(q)]);
      ends[2 * round + 1] += told;
    }
  }
  state.link->copy(map_.passing, ends, 2 * rounds() * kWord, stream_);
}

void Passage::add_tokens_for_hosts() const {
  const CountLists::Parts of = counts.for_hosts();
  const int64_t row = rows_place().row_bytes;
  for (int q = 0; q < p.ranks; ++q)
    state.messages.push_back({base_ + memory_.leaving + of.first[q] * row, of.sent[q] * row,
                              base_ + memory_.arriving + state.round_of[size_t(q)] * p.tokens * row,
                              of.received[q] * row});
}

/// Tokens for the ranks of a host lie one rank's behind the other's, and so do their numbers.
void Passage::add_numbers_for_hosts() const {
  const auto* number = list<int32_t>(memory_.host_number);
  for (int q = 0; q < p.ranks; ++q) {
    const int64_t sent = is_own_relay(q) ? told_to_host(state.rank, state.relays.host_of(q)) : 0;
    const int64_t received = is_relay_of(q) ? told_to_host(q, own_host()) : 0;
    int32_t* came = map_.passing + 2 * rounds() + state.round_of[size_t(q)] * p.tokens * p.top_k;
    state.messages.push_back({number, sent * kWord, came, received * kWord});
    number += sent;
  }
}

void Passage::pass_on() const {
  for (int round = 0; round < rounds(); ++round) pass_on(round);
}

/// The tokens of one rank, through the place of rows that leave, which have left.
void Passage::pass_on(int round) const {
  const int64_t row = rows_place().row_bytes, choices = p.tokens * p.top_k;
  cadre::run(state.steps.pass,
             {.tokens = view(base_ + memory_.arriving + round * p.tokens * row, p.dtype,
                             {p.tokens, p.hidden}),
              .rows = leaving(),
              .map = {.slot_of = map_.passing + 2 * rounds() + round * choices},
              .offsets = {map_.passing + 2 * int64_t(round), 1}},
             {}, stream_);
  const RankMessage none{base_ + memory_.leaving, 0, base_ + memory_.coming, 0};
  state.messages.assign(size_t(p.ranks), none);
  const CountLists::Passed of = counts.passed(round);
  char* came = base_ + memory_.coming;
  for (int q = 0; q < p.ranks; ++q) {
    RankMessage& to = state.messages[size_t(q)];
    to.send = base_ + memory_.leaving + of.first[q] * row;
    to.send_bytes = of.sent[q] * row;
    if (state.round_of[size_t(q)] == round) {
      RankMessage& from = state.messages[size_t(state.relays.relay(q, own_host()))];
      from.receive = came;
      from.receive_bytes = counts.tokens.received[q] * row;
    }
    came += counts.rows.received[q] * row;
  }
  state.all_to_all(state.messages, stream_);
}

}  // namespace cadre::parallel
