#pragma once
#include <algorithm>

#include "cpu/gemm/epilogue.h"
#include "cpu/gemm/means.h"
#include "schedule/expert_rows.h"

namespace cadre::cpu::gemm {

/// How outputs are cut into tiles.
struct TileSizes {
  int64_t height, width;            ///< at most
  int64_t height_unit, width_unit;  ///< all but the last are multiples of these
};

/// Every tile of every expert's output, one after the other: panel by panel, since the tiles of a
/// panel share a part of the weight. Tiles of an expert are about equal. Every thread walks over
/// all of them, and does those whose numbers it draws.
class TileWalk {
 public:
  TileWalk(const GroupedGemmProblem& p, const int32_t* offsets, const TileSizes& sizes)
      : p_(p),
        walk_(offsets, p.experts, p.rows),
        sizes_(sizes),
        cols_(p.pass == Pass::kFprop ? p.n : p.k),
        width_(even(cols_, sizes.width, sizes.width_unit)) {}

  /// Moves on by one tile; false behind the last.
  bool next() {
    row_ += tile_.rows;
    if (row_ == end_) {
      col_ += tile_.cols;
      row_ = first_;
      if ((tile_.rows == 0 || col_ == cols_) && !next_expert()) return false;
    }
    tile_ = {walk_.expert(), row_, std::min(height_, end_ - row_), col_,
             std::min(width_, cols_ - col_)};
    return true;
  }
  const OutTile& tile() const { return tile_; }
  /// The rows of the batch that belong to the tile's expert.
  schedule::ExpertRows rows() const { return walk_.rows(); }

 private:
  bool next_expert() {
    col_ = 0;
    do {
      if (!walk_.next()) return false;
      const bool wgrad = p_.pass == Pass::kWgrad;
      first_ = row_ = wgrad ? 0 : walk_.rows().first;
      end_ = wgrad ? p_.n : walk_.rows().last;
    } while (row_ == end_);
    height_ = even(end_ - first_, sizes_.height, sizes_.height_unit);
    return true;
  }
  static int64_t even(int64_t all, int64_t most, int64_t unit) {
    return std::min(all, round_up(ceil_div(all, ceil_div(all, most)), unit));
  }

  const GroupedGemmProblem& p_;
  schedule::ExpertWalk walk_;
  TileSizes sizes_;
  int64_t cols_, width_, height_ = 0;
  OutTile tile_;
  int64_t first_ = 0, end_ = 0, row_ = 0, col_ = 0;
};

}  // namespace cadre::cpu::gemm
