#include "schedule/strips.h"

#include <gtest/gtest.h>

using cadre::schedule::even_strip;

namespace {

TEST(Strips, HoldEveryTileInAsFewStripsAsCanBe) {
  for (int64_t tiles = 1; tiles <= 60; ++tiles)
    for (int64_t most = 1; most <= 9; ++most) {
      const int64_t strip = even_strip(tiles, most), strips = (tiles + strip - 1) / strip;
      EXPECT_LE(strip, most) << tiles;
      EXPECT_EQ(strips, (tiles + most - 1) / most) << tiles << " / " << most;
      EXPECT_LT(strip - (tiles - (strips - 1) * strip), strips) << tiles << " / " << most;
    }
}

// Blocks that take every second strip had 640 columns each, the others 128.
TEST(Strips, SixTilesAreTwoStripsOfThree) { EXPECT_EQ(even_strip(6, 5), 3); }

TEST(Strips, NoTilesAreOneStrip) { EXPECT_EQ(even_strip(0, 8), 8); }

}  // namespace
