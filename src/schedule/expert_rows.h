#pragma once
#include <cstdint>

#include "cadre/host_device.h"

// Which rows belong to an expert, read from offsets that may be broken. Nobody can check offsets
// before a launch, since they live on the device; so every reader goes through one of these.
//
//   clamp(v) = min(max(v, 0), R)
//
// With good offsets (0 <= offsets[0] <= ... <= offsets[E] <= R) all three agree. With any others:
//   rows_used    clamp(offsets[E]): the tail begins there.
//   ExpertWalk   no row belongs to two experts, nor to one and to the tail: each starts where the
//                one before ended or later. For code in which experts, or they and whoever zeroes
//                the tail, write at the same time.
//   rows_of      0 <= first <= last <= rows_used, in O(1); the rows of two experts may overlap.
namespace cadre::schedule {

/// The rows [first, last) of one expert.
struct ExpertRows {
  int64_t first = 0;
  int64_t last = 0;

  CADRE_HD constexpr int64_t count() const { return last - first; }
};

/// `value` moved into [low, high].
CADRE_HD constexpr int64_t clamp_row(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

/// The first row of the tail.
CADRE_HD constexpr int64_t rows_used(const int32_t* offsets, int experts, int64_t rows) {
  return clamp_row(offsets[experts], 0, rows);
}

/// The rows of one expert, whatever the offsets of those before it. `used`: rows_used().
CADRE_HD constexpr ExpertRows rows_of(const int32_t* offsets, int expert, int64_t used) {
  const int64_t first = clamp_row(offsets[expert], 0, used);
  return {first, clamp_row(offsets[expert + 1], first, used)};
}

/// Every expert in turn, with rows that never overlap:
///
///   for (ExpertWalk walk(offsets, experts, rows); walk.next();) use(walk.expert(), walk.rows());
///
/// A thread that works on some experts only walks over all of them: cheap where it does so once.
class ExpertWalk {
 public:
  CADRE_HD constexpr ExpertWalk(const int32_t* offsets, int experts, int64_t rows)
      : offsets_(offsets), experts_(experts), bound_(rows_used(offsets, experts, rows)) {}

  CADRE_HD constexpr bool next() {
    if (expert_ + 1 >= experts_) return false;
    ++expert_;
    rows_.first = clamp_row(offsets_[expert_], rows_.last, bound_);
    rows_.last = clamp_row(offsets_[expert_ + 1], rows_.first, bound_);
    return true;
  }
  CADRE_HD constexpr int expert() const { return expert_; }
  CADRE_HD constexpr ExpertRows rows() const { return rows_; }

 private:
  const int32_t* offsets_;
  int experts_;
  int64_t bound_;
  int expert_ = -1;
  ExpertRows rows_;
};

}  // namespace cadre::schedule
