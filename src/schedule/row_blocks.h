#pragma once
#include <cstdint>

#include "cadre/host_device.h"

// A dispatch by blocks: N places for the rows that one rank has for another, whatever they are.
namespace cadre::schedule {

/// What went wrong, for the host, in its memory. Whoever has read it clears `what`; until then
/// nothing is added.
struct BlockNote {
  enum What : uint32_t { kNothing, kOverflow, kOtherProblem, kOtherRank };

  uint32_t what = kNothing;
  int32_t rank = 0;    ///< with most rows; or that differs
  int32_t routed = 0;  ///< its rows; or the rank that it says it is
  int32_t most = 0;    ///< rows from one rank to another
};

struct RowBlocks {
  /// What a rank says to all: a tag of the problem, its rank, and its rows for each rank, [P].
  static constexpr int kNameWords = 2;

  int ranks = 1, rank = 0, experts = 1;                 ///< P, this rank, E
  int64_t block = 0, bound = 0;                         ///< N, R
  int64_t choices = 0;                                  ///< t * top_k of this rank
  int32_t tag = 0;                                      ///< of the problem
  bool overflow_is_error = true;                        ///< else rows are dropped
  const int32_t* chosen = nullptr;                      ///< [t, top_k] experts of all
  const int32_t *leaving = nullptr, *sorted = nullptr;  ///< offsets [P * E + 1] of these choices,
                                                        ///< and which each row is
  int32_t* row_of = nullptr;       ///< [t, top_k] in that order, or -1; becomes the place
  int32_t* slot_of = nullptr;      ///< [P * N] written: the choice at a place, or -1
  int32_t* expert_at = nullptr;    ///< [P * N] written: its expert at its rank, or -1
  int32_t* said = nullptr;         ///< [2 + P], written
  const int32_t* heard = nullptr;  ///< [P, 2 + P]: of all ranks
  int32_t* verdict = nullptr;      ///< [3], written; see CollectiveMap
  int32_t* routed = nullptr;       ///< [P], written, optional
  BlockNote* note = nullptr;

  CADRE_HD int words() const { return kNameWords + ranks; }
  CADRE_HD int64_t places() const { return ranks * block; }

  /// Choices of experts of a rank, those beyond its block too.
  CADRE_HD int64_t chosen_of(int to) const {
    const int32_t* own = leaving + int64_t(to) * experts;
    return own[experts] - own[0];
  }
  /// Steps of which each may be made by another thread.
  CADRE_HD int64_t steps() const {
    const int64_t rows = places() < choices ? choices : places();
    return rows < words() ? words() : rows;
  }
  CADRE_HD void make_places(int64_t step) const {
    if (step < places()) fill_place(step);
    if (step < choices && row_of[step] >= 0) row_of[step] = place_of(step);
    if (step < ranks) said[kNameWords + step] = int32_t(chosen_of(int(step)));
    if (step > 0) return;
    said[0] = tag, said[1] = rank;
    verdict[1] = 0, verdict[2] = int32_t(places());
  }

  /// What all say of a rank: rows for it, and the most of them from one rank.
  struct Rows {
    int64_t all = 0, most = 0;
  };
  CADRE_HD Rows rows_for(int to) const {
    Rows rows;
    for (int q = 0; q < ranks; ++q) {
      const int64_t here = heard[int64_t(q) * words() + kNameWords + to];
      rows.all += here;
      if (here > rows.most) rows.most = here;
    }
    return rows;
  }
  /// How a rank differs from what it must be.
  CADRE_HD BlockNote::What difference(int q) const {
    const int32_t* name = heard + int64_t(q) * words();
    if (name[0] != heard[0]) return BlockNote::kOtherProblem;
    return name[1] == q ? BlockNote::kNothing : BlockNote::kOtherRank;
  }
  /// The verdict, from the first rank that differs, or P; the rank with most rows; and the most
  /// rows from one rank to another.
  CADRE_HD BlockNote judge(int other, int fullest, int64_t most) const {
    if (other < ranks)
      return {uint32_t(difference(other)), other, heard[int64_t(other) * words() + 1], 0};
    const int64_t all = rows_for(fullest).all;
    const bool fits = all <= bound && most <= block;
    if (fits || !overflow_is_error) return {};
    return {BlockNote::kOverflow, fullest, int32_t(all), int32_t(most)};
  }

 private:
  CADRE_HD void fill_place(int64_t place) const {
    const int64_t to = place / block, at = place % block;
    const bool is_taken = at < chosen_of(int(to));
    const int32_t slot = is_taken ? sorted[leaving[to * experts] + at] : -1;
    slot_of[place] = slot;
    expert_at[place] = is_taken ? int32_t(chosen[slot] - to * experts) : -1;
  }
  CADRE_HD int32_t place_of(int64_t choice) const {
    const int64_t to = chosen[choice] / experts, at = row_of[choice] - leaving[to * experts];
    return at < block ? int32_t(to * block + at) : -1;
  }
};

}  // namespace cadre::schedule
