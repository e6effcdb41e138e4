#include "schedule/expert_rows.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

using namespace cadre::schedule;

namespace {

/// `offsets` has exactly E + 1 elements, so the sanitizers see a read outside of it.
void expect_inside_and_disjoint(const std::vector<int32_t>& offsets, int64_t rows) {
  const int experts = int(offsets.size()) - 1;
  const int64_t used = rows_used(offsets.data(), experts, rows);
  EXPECT_GE(used, 0);
  EXPECT_LE(used, rows);
  int64_t end = 0;
  int seen = 0;
  for (ExpertWalk walk(offsets.data(), experts, rows); walk.next(); ++seen) {
    EXPECT_EQ(walk.expert(), seen);
    EXPECT_GE(walk.rows().first, end);
    EXPECT_GE(walk.rows().last, walk.rows().first);
    EXPECT_LE(walk.rows().last, used);
    end = walk.rows().last;

    const ExpertRows alone = rows_of(offsets.data(), seen, used);
    EXPECT_GE(alone.first, 0);
    EXPECT_GE(alone.last, alone.first);
    EXPECT_LE(alone.last, used);
  }
  EXPECT_EQ(seen, experts);
}

TEST(ExpertRows, GoodOffsetsAreTakenAsTheyAre) {
  const std::vector<int32_t> offsets = {0, 0, 3, 3, 10, 10};  // empty first, middle and last
  for (ExpertWalk walk(offsets.data(), 5, 12); walk.next();) {
    const ExpertRows alone = rows_of(offsets.data(), walk.expert(), 12);
    EXPECT_EQ(walk.rows().first, offsets[size_t(walk.expert())]);
    EXPECT_EQ(walk.rows().last, offsets[size_t(walk.expert()) + 1]);
    EXPECT_EQ(alone.first, walk.rows().first);
    EXPECT_EQ(alone.last, walk.rows().last);
    EXPECT_EQ(alone.count(), alone.last - alone.first);
  }
  EXPECT_EQ(rows_used(offsets.data(), 5, 12), 10);
}

TEST(ExpertRows, EveryShortVectorOfOffsetsStaysInside) {
  constexpr int kValues[] = {-7, -1, 0, 1, 2, 3, 4, 9};  // R = 3
  std::vector<int32_t> offsets(4);
  for (int a : kValues)
    for (int b : kValues)
      for (int c : kValues)
        for (int d : kValues) {
          offsets = {a, b, c, d};
          expect_inside_and_disjoint(offsets, 3);
        }
}

TEST(ExpertRows, GarbageStaysInside) {
  std::mt19937 random(5);
  std::uniform_int_distribution<int32_t> any(std::numeric_limits<int32_t>::min(),
                                             std::numeric_limits<int32_t>::max());
  for (int experts : {1, 2, 3, 8, 64, 128, 384, 1024})
    for (int64_t rows : {int64_t(0), int64_t(1), int64_t(1000), int64_t(1) << 31}) {
      std::vector<int32_t> offsets(size_t(experts) + 1);
      for (int32_t& offset : offsets) offset = any(random);
      expect_inside_and_disjoint(offsets, rows);
    }
}

TEST(ExpertRows, WorksAtCompileTime) {
  constexpr int32_t kOffsets[] = {0, 5, 2, 9};
  static_assert(rows_of(kOffsets, 1, 8).count() == 0);
  static_assert(rows_of(kOffsets, 2, 8).first == 2 && rows_of(kOffsets, 2, 8).last == 8);
  static_assert(rows_used(kOffsets, 3, 8) == 8);
}

}  // namespace
