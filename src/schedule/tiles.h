#pragma once
#include <cstdint>

#include "schedule/expert_rows.h"

// Which tile of a grouped product comes when. Blocks of a persistent grid take tiles by number, so
// every block can find its next one alone: it only walks forwards.
namespace cadre::schedule {

/// How many tiles the output of one expert is cut into.
struct TileGrid {
  int64_t down = 0, across = 0;

  CADRE_HD constexpr int64_t count() const { return down * across; }
};

/// A tile of one expert's output.
struct TilePlace {
  int64_t down = 0, across = 0;

  constexpr bool operator==(const TilePlace&) const = default;
};

/// The tile with that index, band by band of `band` columns, row by row in a band: tiles that run
/// at the same time then share both of their operands in L2.
CADRE_HD constexpr TilePlace banded(int64_t index, const TileGrid& grid, int64_t band) {
  const int64_t whole = band * grid.down, first = index / whole * band;
  const int64_t width = grid.across - first < band ? grid.across - first : band;
  const int64_t inside = index % whole;
  return {inside / width, first + inside % width};
}

/// How high tiles of an expert's rows are: about equal, multiples of `unit` but for the last, at
/// most `most`.
struct TileHeight {
  int64_t most = 0, unit = 1;

  CADRE_HD constexpr int64_t of(int64_t rows) const {
    const int64_t tiles = (rows + most - 1) / most, each = (rows + tiles - 1) / tiles;
    return (each + unit - 1) / unit * unit;
  }
};

/// Tiles of all experts whose output rows are ragged, expert by expert.
class RaggedTiles {
 public:
  CADRE_HD constexpr RaggedTiles(const ExpertWalk& walk, const TileHeight& height, int64_t across)
      : walk_(walk), heights_(height), grid_{0, across} {}

  /// Moves to the tile with that number, which never falls; false behind the last.
  CADRE_HD constexpr bool seek(int64_t number) {
    while (number - before_ >= grid_.count()) {
      before_ += grid_.count();
      grid_.down = 0;
      if (!walk_.next()) return false;
      const int64_t rows = walk_.rows().count();
      if (rows == 0) continue;
      height_ = heights_.of(rows);
      grid_.down = (rows + height_ - 1) / height_;
    }
    index_ = number - before_;
    return true;
  }
  CADRE_HD constexpr int expert() const { return walk_.expert(); }
  CADRE_HD constexpr TilePlace place(int64_t band) const { return banded(index_, grid_, band); }
  /// The rows of the batch that tiles in that row of tiles cover.
  CADRE_HD constexpr ExpertRows rows(const TilePlace& place) const {
    const ExpertRows all = walk_.rows();
    const int64_t first = all.first + place.down * height_, last = first + height_;
    return {first, last < all.last ? last : all.last};
  }

 private:
  ExpertWalk walk_;
  TileHeight heights_;
  TileGrid grid_;
  int64_t height_ = 1, before_ = 0, index_ = 0;
};

}  // namespace cadre::schedule
