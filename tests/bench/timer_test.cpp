#include "bench/timer.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "cadre/error.h"

using namespace cadre;

TEST(Quantiles, InterpolateBetweenTheSortedSamples) {
  const bench::Quantiles q = bench::quantiles({30, 0, 20, 10});
  EXPECT_DOUBLE_EQ(q.p10, 3);
  EXPECT_DOUBLE_EQ(q.median, 15);
  EXPECT_DOUBLE_EQ(q.p90, 27);
}

TEST(Quantiles, OfOneSampleAreThatSample) {
  const bench::Quantiles q = bench::quantiles({7});
  EXPECT_EQ(q.p10, 7);
  EXPECT_EQ(q.median, 7);
  EXPECT_EQ(q.p90, 7);
}

TEST(Quantiles, OfNoneAreRefused) { EXPECT_THROW(bench::quantiles({}), InvalidArgument); }

TEST(TimeUs, CountsMicroseconds) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const double us =
      bench::time_us([] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
  EXPECT_GE(us, 5000);
  EXPECT_LE(us, std::chrono::duration<double>(Clock::now() - start).count() * 1e6);
}
