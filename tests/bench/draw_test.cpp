#include "bench/draw.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>

#include "cadre/error.h"

using namespace cadre;
using bench::Draw;

namespace {

int64_t sum(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t(0));
}

}  // namespace

TEST(DrawCounts, EveryDistributionUsesEveryRow) {
  for (const char* words : {"uniform", "zipf:1.2", "gamma:1", "onehot"})
    for (const int experts : {1, 8, 384}) {
      const auto counts = bench::draw_counts({.seed = 3, .offsets = words}, 5000, experts);
      EXPECT_EQ(counts.size(), size_t(experts));
      EXPECT_EQ(sum(counts), 5000) << words;
    }
}

TEST(DrawCounts, ALiveShareLeavesATail) {
  EXPECT_EQ(sum(bench::draw_counts({.live = 0.75}, 4000, 8)), 3000);
}

TEST(DrawCounts, ShapesAreThoseOfTheirNames) {
  const auto uniform = bench::draw_counts({.offsets = "uniform"}, 64000, 64);
  for (const int64_t count : uniform) EXPECT_NEAR(double(count), 1000, 6 * std::sqrt(1000.0));
  auto zipf = bench::draw_counts({.offsets = "zipf:1"}, 64000, 64);
  std::sort(zipf.rbegin(), zipf.rend());
  double harmonic = 0;
  for (int i = 1; i <= 64; ++i) harmonic += 1.0 / i;
  EXPECT_NEAR(double(zipf[0]), 64000 / harmonic, 6 * std::sqrt(64000 / harmonic));
  EXPECT_NEAR(double(zipf[1]), 32000 / harmonic, 6 * std::sqrt(32000 / harmonic));
  const auto gamma =
      bench::draw_counts({.offsets = "gamma:4"}, 640000, 640);  // as wide as its mean / 2
  double squares = 0;
  for (const int64_t count : gamma) squares += double((count - 1000) * (count - 1000));
  EXPECT_NEAR(std::sqrt(squares / 640), 500, 100);
  const auto onehot = bench::draw_counts({.offsets = "onehot"}, 100, 64);
  EXPECT_EQ(std::count(onehot.begin(), onehot.end(), 0), 63);
}

TEST(DrawCounts, DependOnTheSeedOnly) {
  EXPECT_EQ(bench::draw_counts({.seed = 5}, 999, 8), bench::draw_counts({.seed = 5}, 999, 8));
  EXPECT_NE(bench::draw_counts({.seed = 5}, 999, 8), bench::draw_counts({.seed = 6}, 999, 8));
}

TEST(DrawWeights, AreThoseOfAFileUnlessAllAreZero) {
  const std::string path = testing::TempDir() + "cadre_draw_weights";
  const Draw draw{.offsets = path, .counts_are_weights = true};
  std::ofstream(path) << "0 3 1";
  EXPECT_EQ(bench::draw_weights(draw, 3), (std::vector<double>{0, 3, 1}));
  EXPECT_EQ(sum(bench::draw_counts(draw, 1000, 3)), 1000);
  std::ofstream(path) << "0 0 0";
  EXPECT_THROW(bench::draw_choices(draw, 9, 1, 3), InvalidArgument);
  EXPECT_EQ(bench::draw_counts(draw, 1000, 3), (std::vector<int64_t>{0, 0, 0}));
  std::filesystem::remove(path);
}

TEST(DrawChoices, AreDistinctExpertsOrDropped) {
  const int experts = 6, top_k = 4;
  const auto choices = bench::draw_choices({.offsets = "zipf:2"}, 300, top_k, experts);
  ASSERT_EQ(choices.size(), 300u * top_k);
  int64_t dropped = 0;
  for (size_t t = 0; t < 300; ++t) {
    std::set<int64_t> seen;
    for (size_t j = 0; j < top_k; ++j) {
      const int64_t e = choices[t * top_k + j];
      EXPECT_TRUE(e >= -1 && e < experts);
      if (e == -1)
        ++dropped;
      else
        EXPECT_TRUE(seen.insert(e).second) << "token " << t << " chose expert " << e << " twice";
    }
  }
  EXPECT_GT(dropped, 20);
  EXPECT_LT(dropped, 200);
}

TEST(Normal, HasMeanZeroAndVarianceOne) {
  double mean = 0, square = 0;
  const int count = 100000;
  for (int i = 0; i < count; ++i) {
    const double x = bench::normal(9, uint64_t(i));
    mean += x / count;
    square += x * x / count;
  }
  EXPECT_NEAR(mean, 0, 0.02);
  EXPECT_NEAR(square, 1, 0.02);
}

TEST(FillNormal, LeavesTheTailPoisoned) {
  bench::Buffers buffers;
  const TensorView v = buffers.tensor(DType::kF32, {3, 4});
  bench::fill_normal(v, 2, 1);
  const auto* data = static_cast<const float*>(v.data);
  for (int i = 0; i < 8; ++i) EXPECT_TRUE(std::isfinite(data[i]));
  for (int i = 8; i < 12; ++i) EXPECT_TRUE(std::isnan(data[i]));
}
