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

/// The rows of an expert that a tile `height` rows high covers, the one with `down` tiles above it.
CADRE_HD constexpr ExpertRows rows_of_tile(const ExpertRows& all, int64_t down, int64_t height) {
  const int64_t first = all.first + down * height, last = first + height;
  return {first, last < all.last ? last : all.last};
}

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
    return rows_of_tile(walk_.rows(), place.down, height_);
  }

 private:
  ExpertWalk walk_;
  TileHeight heights_;
  TileGrid grid_;
  int64_t height_ = 1, before_ = 0, index_ = 0;
};

/// Two tiles that are worked on together: one above the other, or side by side.
struct TilePair {
  TilePlace first;
  bool side_by_side = false;

  constexpr bool operator==(const TilePair&) const = default;
};

/// Pairs of tiles of all experts whose output rows are ragged, expert by expert. Tiles are `height`
/// rows high but for an expert's last; those of two neighbouring rows of tiles are pairs, and where
/// their number is odd, those of the last one are, side by side.
class PairedTiles {
 public:
  CADRE_HD constexpr PairedTiles(const ExpertWalk& walk, int64_t height, int64_t across)
      : walk_(walk), height_(height), across_(across) {}

  /// As RaggedTiles, of pairs.
  CADRE_HD constexpr bool seek(int64_t number) {
    while (number - before_ >= upright_ + flat_) {
      before_ += upright_ + flat_;
      upright_ = flat_ = 0;
      if (!walk_.next()) return false;
      down_ = (walk_.rows().count() + height_ - 1) / height_;
      upright_ = down_ / 2 * across_;
      flat_ = down_ % 2 * ((across_ + 1) / 2);
    }
    index_ = number - before_;
    return true;
  }
  CADRE_HD constexpr int expert() const { return walk_.expert(); }
  CADRE_HD constexpr TilePair pair(int64_t band) const {
    if (index_ >= upright_) return {{down_ - 1, 2 * (index_ - upright_)}, true};
    const TilePlace place = banded(index_, {down_ / 2, across_}, band);
    return {{2 * place.down, place.across}, false};
  }
  /// Of the batch, in that row of tiles.
  CADRE_HD constexpr ExpertRows rows(int64_t down) const {
    return rows_of_tile(walk_.rows(), down, height_);
  }

 private:
  ExpertWalk walk_;
  int64_t height_, across_;
  int64_t down_ = 0, upright_ = 0, flat_ = 0;  ///< rows of tiles; pairs of either kind
  int64_t before_ = 0, index_ = 0;
};

}  // namespace cadre::schedule
