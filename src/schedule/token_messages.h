#pragma once
#include <cstdint>

#include "cadre/host_device.h"

// Tokens that cross once to each rank that has rows of them. Rows for a rank stand in the order of
// (expert, token, choice), and its tokens in the order of their first rows. So the first rows need
// the first tokens, never more of them than rows: what has no room are the last rows.
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
  int32_t* told = nullptr;  ///< [P], written: tokens for each rank

  CADRE_HD void find_first(int64_t choice) const {
    const bool is_first = is_expert(chosen[choice]) && first_of(choice) == choice;
    firsts[choice] = is_first ? chosen[choice] : -1;
  }
  /// Steps of which each may be made by another thread.
  CADRE_HD int64_t steps() const { return choices < ranks ? ranks : choices; }
  CADRE_HD void number(int64_t step) const {
    if (step < ranks) {
      const int32_t* own = token_offsets + step * experts;
      told[step] = own[experts] - own[0];
    }
    if (step >= choices || !is_expert(chosen[step])) return;
    const int64_t begin = int64_t(chosen[step] / experts) * experts;
    const int32_t row = row_of[step], token = token_of[first_of(step)];
    back[row] = (row - row_offsets[begin]) - (token - token_offsets[begin]);
  }

 private:
  CADRE_HD bool is_expert(int32_t e) const { return e >= 0 && e < int64_t(ranks) * experts; }
  /// The choice of the same token that has its first row at the rank of this one.
  CADRE_HD int64_t first_of(int64_t choice) const {
    const int32_t rank = chosen[choice] / experts;
    const int64_t begin = choice / top_k * top_k;
    int64_t first = choice;
    for (int64_t i = begin + top_k - 1; i >= begin; --i) {
      const bool is_there = is_expert(chosen[i]) && chosen[i] / experts == rank;
      if (is_there && chosen[i] <= chosen[first]) first = i;
    }
    return first;
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
