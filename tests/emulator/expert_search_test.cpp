// A warp finds the expert of a tile as a walk over all experts does, with broken offsets too.
#include "tests/emulator/words.h"
//
#include "cuda/gemm/expert_search.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "cuda/device/launch.h"
#include "schedule/tiles.h"

namespace cadre::cuda {
namespace {

constexpr int64_t kHeight = 64;
constexpr int kLanes = 32;

/// What is known of a tile's expert.
struct Found {
  int expert = -1;
  int64_t first = 0, last = 0, index = 0;

  bool operator==(const Found&) const = default;
};

struct Case {
  std::vector<int32_t> offsets;
  int64_t rows, across, first, step;  ///< first tile, and how far apart tiles are

  int experts() const { return int(offsets.size()) - 1; }
};

template <class Search>
__device__ std::vector<Found> find_all(Search search, const Case& c) {
  const auto tiles = [&](int64_t rows) { return (rows + kHeight - 1) / kHeight * c.across; };
  std::vector<Found> all;
  for (int64_t number = c.first; search.seek(number, tiles); number += c.step)
    all.push_back({search.expert(), search.rows().first, search.rows().last, search.index()});
  return all;
}

__global__ void search_kernel(const Case& c, std::vector<Found>* of_lanes) {
  of_lanes[threadIdx.x] =
      find_all(gemm::WarpExpertSearch(c.offsets.data(), c.experts(), c.rows), c);
}

void expect_as_walked(const Case& c) {
  const auto want = find_all(schedule::ExpertSearch(c.offsets.data(), c.experts(), c.rows), c);
  std::vector<Found> got[kLanes];
  launch(search_kernel, {1, kLanes, 0, nullptr}, c, &got[0]);
  for (int lane = 0; lane < kLanes; ++lane)
    EXPECT_EQ(got[lane], want) << "lane " << lane << " of " << c.experts() << " experts";
}

TEST(WarpExpertSearch, FindsWhatAWalkFinds) {
  std::mt19937 random(7);
  const auto below = [&](int bound) { return int32_t(random() % unsigned(bound)); };
  for (int draw = 0; draw < 60; ++draw) {
    Case c{{0}, 0, 1 + below(4), below(3), 1 + below(draw % 2 == 0 ? 3 : 90)};
    const int experts = draw % 3 == 0 ? 1 + below(4) : 1 + below(140);
    for (int e = 0; e < experts; ++e)
      c.offsets.push_back(c.offsets.back() + (below(3) == 0 ? 0 : below(150)));
    c.rows = c.offsets.back() + below(50);
    if (draw % 5 == 4)
      for (int32_t& offset : c.offsets) offset = below(900) - 100;  // broken
    expect_as_walked(c);
  }
}

TEST(WarpExpertSearch, FindsTheEndsOfWindows) {
  for (const int experts : {31, 32, 33, 64, 65})
    for (const bool all_but_last_empty : {false, true}) {
      Case c{{0}, 3000, 2, 0, 1};
      for (int e = 1; e <= experts; ++e)
        c.offsets.push_back(all_but_last_empty ? (e == experts ? 70 : 0) : c.offsets.back() + 3);
      expect_as_walked(c);
    }
}

}  // namespace
}  // namespace cadre::cuda
