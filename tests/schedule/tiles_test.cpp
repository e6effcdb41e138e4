#include "schedule/tiles.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

using namespace cadre::schedule;

namespace {

TEST(Tiles, BandsHoldEveryTileOnce) {
  for (int64_t down = 1; down <= 7; ++down)
    for (int64_t across = 1; across <= 19; ++across)
      for (int64_t band : {1, 3, 8, 100}) {
        const TileGrid grid{down, across};
        std::set<std::pair<int64_t, int64_t>> seen;
        for (int64_t i = 0; i < grid.count(); ++i) {
          const TilePlace place = banded(i, grid, band);
          EXPECT_TRUE(place.down >= 0 && place.down < down);
          EXPECT_TRUE(place.across >= 0 && place.across < across);
          seen.insert({place.down, place.across});
        }
        EXPECT_EQ(int64_t(seen.size()), grid.count()) << down << " x " << across << " / " << band;
      }
}

TEST(Tiles, BandsAreWalkedRowByRow) {
  const TileGrid grid{2, 5};
  const std::vector<TilePlace> want = {{0, 0}, {0, 1}, {1, 0}, {1, 1}, {0, 2},
                                       {0, 3}, {1, 2}, {1, 3}, {0, 4}, {1, 4}};
  for (size_t i = 0; i < want.size(); ++i) EXPECT_EQ(banded(int64_t(i), grid, 2), want[i]) << i;
}

TEST(Tiles, HeightsAreAboutEqual) {
  const TileHeight height{256, 16};
  EXPECT_EQ(height.of(1), 16);
  EXPECT_EQ(height.of(256), 256);
  EXPECT_EQ(height.of(257), 144);  // 144 and 113, not 256 and 1
  EXPECT_EQ(height.of(2050), 240);
  for (int64_t rows = 1; rows < 3000; ++rows) {
    EXPECT_LE(height.of(rows), 256) << rows;
    EXPECT_EQ(height.of(rows) % 16, 0) << rows;
    EXPECT_EQ((rows + height.of(rows) - 1) / height.of(rows), (rows + 255) / 256) << rows;
  }
}

/// How often each row is covered in every column of tiles, by as many walkers as there are.
struct Cover {
  std::vector<int> times;
  int64_t tiles = 0;
};

Cover cover(const std::vector<int32_t>& offsets, int64_t rows, int64_t across, int walkers) {
  const TileHeight height{64, 16};
  Cover all{std::vector<int>(size_t(rows * across)), 0};
  const int experts = int(offsets.size()) - 1;
  for (int w = 0; w < walkers; ++w) {
    RaggedTiles tiles({offsets.data(), experts, rows}, height, across);
    for (int64_t number = w; tiles.seek(number); number += walkers, ++all.tiles) {
      const TilePlace place = tiles.place(3);
      const ExpertRows covered = tiles.rows(place);
      EXPECT_GT(covered.count(), 0);
      EXPECT_LE(covered.count(), height.most);
      ExpertWalk walk(offsets.data(), experts, rows);
      while (walk.next() && walk.expert() != tiles.expert()) {
      }
      EXPECT_GE(covered.first, walk.rows().first);
      EXPECT_LE(covered.last, walk.rows().last);
      for (int64_t r = covered.first; r < covered.last; ++r)
        ++all.times[size_t(r * across + place.across)];
    }
  }
  return all;
}

/// Every row of an expert once in every column, and no row of the tail.
void expect_exact(const std::vector<int32_t>& offsets, int64_t rows, int64_t across, int walkers) {
  const Cover all = cover(offsets, rows, across, walkers);
  std::vector<int> want(all.times.size());
  for (ExpertWalk walk(offsets.data(), int(offsets.size()) - 1, rows); walk.next();)
    for (int64_t r = walk.rows().first; r < walk.rows().last; ++r)
      for (int64_t c = 0; c < across; ++c) want[size_t(r * across + c)] = 1;
  EXPECT_EQ(all.times, want) << walkers << " walkers";
}

TEST(Tiles, EveryRowOfEveryExpertOnce) {
  std::mt19937 random(3);
  for (int draw = 0; draw < 600; ++draw) {
    const int experts = int(random() % 9) + 1, walkers = int(random() % 70) + 1;
    std::vector<int32_t> offsets = {0};
    for (int e = 0; e < experts; ++e)
      offsets.push_back(offsets.back() + (random() % 3 == 0 ? 0 : int32_t(random() % 200)));
    expect_exact(offsets, offsets.back() + int64_t(random() % 50), 1 + draw % 5, walkers);
  }
  expect_exact({0, 0, 0, 0}, 0, 2, 3);
  expect_exact({0, 0, 500, 500}, 500, 7, 132);
}

TEST(Tiles, BrokenOffsetsStayInside) {
  std::mt19937 random(4);
  for (int draw = 0; draw < 300; ++draw) {
    std::vector<int32_t> offsets(size_t(random() % 8) + 2);
    for (int32_t& offset : offsets) offset = int32_t(random() % 700) - 100;
    expect_exact(offsets, int64_t(random() % 400), 2, 1 + draw % 9);
  }
}

/// How often pairs of tiles cover each row in every column of tiles.
std::vector<int> cover_by_pairs(const std::vector<int32_t>& offsets, int64_t rows, int64_t across,
                                int walkers) {
  constexpr int64_t kHeight = 64;
  std::vector<int> times(size_t(rows * across));
  const int experts = int(offsets.size()) - 1;
  for (int w = 0; w < walkers; ++w) {
    PairedTilesBy<ExpertSearch> pairs({offsets.data(), experts, rows}, kHeight, across);
    for (int64_t number = w; pairs.seek(number); number += walkers) {
      const auto [first, side_by_side] = pairs.pair(3);
      for (int second = 0; second < 2; ++second) {
        const TilePlace place{first.down + (side_by_side ? 0 : second),
                              first.across + (side_by_side ? second : 0)};
        const ExpertRows covered = pairs.rows(place.down);
        EXPECT_GT(covered.count(), 0);
        EXPECT_LE(covered.count(), kHeight);
        if (second == 1 && place.across == across) continue;  // an odd column has no neighbour
        for (int64_t r = covered.first; r < covered.last; ++r)
          ++times[size_t(r * across + place.across)];
      }
    }
  }
  return times;
}

TEST(Tiles, PairsCoverEveryRowOfEveryExpertOnce) {
  std::mt19937 random(5);
  for (int draw = 0; draw < 400; ++draw) {
    const int experts = int(random() % 9) + 1, walkers = int(random() % 40) + 1;
    std::vector<int32_t> offsets = {0};
    for (int e = 0; e < experts; ++e)
      offsets.push_back(offsets.back() + (random() % 3 == 0 ? 0 : int32_t(random() % 300)));
    if (draw % 4 == 3)
      for (int32_t& offset : offsets) offset = int32_t(random() % 700) - 100;  // broken
    const int64_t rows = offsets.back() < 0 ? 40 : offsets.back() + int64_t(random() % 50);
    const int64_t across = 1 + draw % 5;
    std::vector<int> want(size_t(rows * across));
    for (ExpertWalk walk(offsets.data(), experts, rows); walk.next();)
      for (int64_t r = walk.rows().first; r < walk.rows().last; ++r)
        for (int64_t c = 0; c < across; ++c) want[size_t(r * across + c)] = 1;
    EXPECT_EQ(cover_by_pairs(offsets, rows, across, walkers), want) << draw;
  }
}

TEST(Tiles, PairsStandUprightUnlessARowIsLeft) {
  const int32_t offsets[] = {0, 0, 300, 310};  // rows of tiles: none, two and a half, one
  const std::vector<std::pair<int, TilePair>> want = {
      {1, {{0, 0}, false}}, {1, {{0, 1}, false}}, {1, {{0, 2}, false}}, {1, {{2, 0}, true}},
      {1, {{2, 2}, true}},  {2, {{0, 0}, true}},  {2, {{0, 2}, true}}};
  PairedTilesBy<ExpertSearch> pairs({offsets, 3, 310}, 128, 3);
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_TRUE(pairs.seek(int64_t(i)));
    EXPECT_EQ(pairs.expert(), want[i].first) << i;
    EXPECT_EQ(pairs.pair(8), want[i].second) << i;
  }
  EXPECT_FALSE(pairs.seek(int64_t(want.size())));
}

TEST(Tiles, NumbersMayBeFarApart) {
  std::vector<int32_t> offsets = {0};
  for (int e = 0; e < 1024; ++e) offsets.push_back(offsets.back() + e % 3);
  expect_exact(offsets, offsets.back(), 1, 500);
}

}  // namespace
