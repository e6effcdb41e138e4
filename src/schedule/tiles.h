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
/// most `most`, which is a multiple of it.
struct TileHeight {
  int64_t most = 0, unit = 1;

  CADRE_HD constexpr int64_t tiles(int64_t rows) const { return (rows + most - 1) / most; }
  CADRE_HD constexpr int64_t of(int64_t rows) const {
    const int64_t each = (rows + tiles(rows) - 1) / tiles(rows);
    return (each + unit - 1) / unit * unit;
  }
};

/// The rows of an expert that a tile `height` rows high covers, the one with `down` tiles above it.
CADRE_HD constexpr ExpertRows rows_of_tile(const ExpertRows& all, int64_t down, int64_t height) {
  const int64_t first = all.first + down * height, last = first + height;
  return {first, last < all.last ? last : all.last};
}

/// Finds the expert that has a tile, by a walk over all of them.
class ExpertSearch {
 public:
  CADRE_HD constexpr ExpertSearch(const int32_t* offsets, int experts, int64_t rows)
      : walk_(offsets, experts, rows) {}

  /// Moves to the expert that has the tile with that number, which never falls; false behind the
  /// last. `tiles(rows)`: into how many an expert with so many rows is cut.
  template <class Tiles>
  CADRE_HD constexpr bool seek(int64_t number, const Tiles& tiles) {
    while (number - before_ >= count_) {
      before_ += count_;
      count_ = 0;
      if (!walk_.next()) return false;
      count_ = tiles(walk_.rows().count());
    }
    index_ = number - before_;
    return true;
  }
  CADRE_HD constexpr int expert() const { return walk_.expert(); }
  CADRE_HD constexpr ExpertRows rows() const { return walk_.rows(); }
  /// The number of the tile among those of its expert.
  CADRE_HD constexpr int64_t index() const { return index_; }

 private:
  ExpertWalk walk_;
  int64_t before_ = 0, count_ = 0, index_ = 0;
};

/// Tiles of all experts whose output rows are ragged, expert by expert.
template <class Search>
class RaggedTilesBy {
 public:
  CADRE_HD constexpr RaggedTilesBy(const Search& search, const TileHeight& height, int64_t across)
      : search_(search), heights_(height), across_(across) {}

  /// Moves to the tile with that number, which never falls; false behind the last.
  CADRE_HD constexpr bool seek(int64_t number) {
    return search_.seek(number, [this](int64_t rows) { return heights_.tiles(rows) * across_; });
  }
  CADRE_HD constexpr int expert() const { return search_.expert(); }
  CADRE_HD constexpr TilePlace place(int64_t band) const {
    return banded(search_.index(), {heights_.tiles(search_.rows().count()), across_}, band);
  }
  /// The rows of the batch that tiles in that row of tiles cover.
  CADRE_HD constexpr ExpertRows rows(const TilePlace& place) const {
    return rows_of_tile(search_.rows(), place.down, heights_.of(search_.rows().count()));
  }

 private:
  Search search_;
  TileHeight heights_;
  int64_t across_;
};
using RaggedTiles = RaggedTilesBy<ExpertSearch>;

/// Two tiles that are worked on together: one above the other, or side by side.
struct TilePair {
  TilePlace first;
  bool side_by_side = false;

  constexpr bool operator==(const TilePair&) const = default;
};

/// Pairs of tiles of all experts whose output rows are ragged, expert by expert. Tiles are `height`
/// rows high but for an expert's last; those of two neighbouring rows of tiles are pairs, and where
/// their number is odd, those of the last one are, side by side.
template <class Search>
class PairedTilesBy {
 public:
  CADRE_HD constexpr PairedTilesBy(const Search& search, int64_t height, int64_t across)
      : search_(search), height_(height), across_(across) {}

  /// As RaggedTilesBy, of pairs.
  CADRE_HD constexpr bool seek(int64_t number) {
    return search_.seek(number, [this](int64_t rows) {
      return upright(down(rows)) + down(rows) % 2 * ((across_ + 1) / 2);
    });
  }
  CADRE_HD constexpr int expert() const { return search_.expert(); }
  CADRE_HD constexpr TilePair pair(int64_t band) const {
    const int64_t all = down(search_.rows().count()), beyond = search_.index() - upright(all);
    if (beyond >= 0) return {{all - 1, 2 * beyond}, true};
    const TilePlace place = banded(search_.index(), {all / 2, across_}, band);
    return {{2 * place.down, place.across}, false};
  }
  /// Of the batch, in that row of tiles.
  CADRE_HD constexpr ExpertRows rows(int64_t down) const {
    return rows_of_tile(search_.rows(), down, height_);
  }

 private:
  CADRE_HD constexpr int64_t down(int64_t rows) const { return (rows + height_ - 1) / height_; }
  CADRE_HD constexpr int64_t upright(int64_t down) const { return down / 2 * across_; }

  Search search_;
  int64_t height_, across_;
};

}  // namespace cadre::schedule
