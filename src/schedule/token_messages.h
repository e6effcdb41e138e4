#pragma once
#include <cstdint>

#include "cadre/host_device.h"

// Tokens that cross once to each rank that has rows of them. Rows for a rank stand in the order of
// (expert, token, choice), and its tokens in the order of their first rows. So the first rows need
// the first tokens, never more of them than rows: what has no room are the last rows. By host they
// cross once to each host, in the order of their first rows there, and numbers go along that say
// which of them are for each of its ranks.
namespace cadre::schedule {

/// What a rank sends.
struct LeavingTokens {
  int ranks = 1, experts = 1, top_k = 1;  ///< P, E
  int64_t choices = 0;                    ///< t * top_k of this rank
  const int32_t* chosen = nullptr;        ///< [t, top_k] experts of all
  int32_t* firsts = nullptr;              ///< [t, top_k], written by find_first(): the expert where
                                          ///< a choice has the first row of its token at a rank, or
                                          ///< -1. Sorted as choices are, they are the tokens
  const int32_t *row_of = nullptr, *row_offsets = nullptr;      ///< [t, top_k], [P * E + 1] of the
                                                                ///< choices, sorted
  const int32_t *token_of = nullptr, *token_offsets = nullptr;  ///< the same of `firsts`
  int32_t* back = nullptr;  ///< [t * top_k], written: how many places before a row its token stands
                            ///< among the tokens, each counted from the first for their rank
  int32_t* told = nullptr;  ///< [P], written: tokens for each rank; by host those for each host
                            ///< behind them

  int host_ranks = 0;              ///< by host: ranks of each, see HostRelays; else 0
  int32_t* host_firsts = nullptr;  ///< by host: as `firsts`, of hosts in the place of ranks
  const int32_t *host_token_of = nullptr, *host_token_offsets = nullptr;  ///< those, sorted
  /// [t * top_k], by host, written: of a token for a rank, which of those for its host it is.
  int32_t* host_number = nullptr;

  CADRE_HD void find_first(int64_t choice) const {
    firsts[choice] = is_first(choice, experts) ? chosen[choice] : -1;
    if (host_ranks > 0)
      host_firsts[choice] = is_first(choice, host_experts()) ? chosen[choice] : -1;
  }
  /// Steps of which each may be made by another thread.
  CADRE_HD int64_t steps() const { return choices < ranks ? ranks : choices; }
  CADRE_HD void number(int64_t step) const {
    if (step < ranks) {
      const int32_t* own = token_offsets + step * experts;
      told[step] = own[experts] - own[0];
    }
    if (host_ranks > 0 && step * host_ranks < ranks) count_for_host(step);
    if (step >= choices || !is_expert(chosen[step])) return;
    const int64_t begin = int64_t(chosen[step] / experts) * experts;
    const int32_t row = row_of[step], token = token_of[first_of(step, experts)];
    back[row] = (row - row_offsets[begin]) - (token - token_offsets[begin]);
    if (host_ranks > 0 && is_first(step, experts)) host_number[token] = number_for_host(step);
  }

 private:
  CADRE_HD bool is_expert(int32_t e) const { return e >= 0 && e < all_experts(); }
  CADRE_HD int64_t all_experts() const { return int64_t(ranks) * experts; }
  CADRE_HD int host_experts() const { return host_ranks * experts; }

  /// The choice of the same token that has its first row at the rank of this one, or, of as many
  /// experts as a host has, at its host.
  CADRE_HD int64_t first_of(int64_t choice, int each) const {
    const int32_t there = chosen[choice] / each;
    const int64_t begin = choice / top_k * top_k;
    int64_t first = choice;
    for (int64_t i = begin + top_k - 1; i >= begin; --i) {
      const bool is_there = is_expert(chosen[i]) && chosen[i] / each == there;
      if (is_there && chosen[i] <= chosen[first]) first = i;
    }
    return first;
  }
  CADRE_HD bool is_first(int64_t choice, int each) const {
    return is_expert(chosen[choice]) && first_of(choice, each) == choice;
  }
  CADRE_HD void count_for_host(int64_t host) const {
    const int64_t begin = host * host_experts(), end = begin + host_experts();
    const int64_t last = end < all_experts() ? end : all_experts();
    told[ranks + host] = host_token_offsets[last] - host_token_offsets[begin];
  }
  CADRE_HD int32_t number_for_host(int64_t choice) const {
    const int32_t begin = chosen[choice] / host_experts() * host_experts();
    return host_token_of[first_of(choice, host_experts())] - host_token_offsets[begin];
  }
};

/// What a rank has received. Tokens from a rank begin where its rows would.
struct ComingTokens {
  int64_t rows = 0, bound = 0;    ///< that came; R
  const int32_t* back = nullptr;  ///< [R]: of rows in the order in which they come
  const float* prob = nullptr;    ///< [R], likewise
  int32_t* came_at = nullptr;     ///< [R]: the number of a row among them; becomes its token's
  float* row_prob = nullptr;      ///< [R], written, optional
  bool zero_tail = false;         ///< of row_prob

  CADRE_HD int64_t steps() const { return zero_tail && row_prob != nullptr ? bound : rows; }
  CADRE_HD void find(int64_t row) const {
    const int32_t came = row < rows ? came_at[row] : 0;
    if (row < rows) came_at[row] = came - back[came];
    if (row_prob != nullptr) row_prob[row] = row < rows ? prob[came] : 0;
  }
};

}  // namespace cadre::schedule
