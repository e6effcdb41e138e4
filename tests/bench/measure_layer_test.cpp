// Timing of layers: what is timed, beside what, and that broken results are not timed.
#include <gtest/gtest.h>

#include "bench/measure.h"
#include "tests/bench/host_accelerator.h"

namespace cadre {
namespace {

struct Layer {
  const char* problem;
  double products, products_of_forward;
};
constexpr Layer kLayers[] = {
    {"grouped_linear R=24 N=16 K=8 E=3 deferred=yes", 3, 1},
    {"grouped_mlp R=24 H=16 F=8 E=3 act=relu prob=yes wgrad1=no", 5, 2},
    {"moe T=12 top_k=2 H=16 F=8 E=3 act=relu", 6, 2},
    {"moe T=12 top_k=2 H=16 F=8 E=3 act=relu deferred=yes keep_rows=no dgrad=no", 5, 2},
    {"sequential | grouped_linear R=24 N=8 K=16 E=3 | activation forward relu R=24 F=8 E=3 | "
     "grouped_linear R=24 N=16 K=8 E=3",
     6, 2},
};
const bench::MeasureOptions kOnce{.contest = {.repeat = 1}};

TEST(MeasureLayer, TimesForwardAndAStepBesideTheirProducts) {
  for (const Layer& layer : kLayers) {
    const auto all = bench::measure_layer(layer.problem, kOnce);
    ASSERT_EQ(all.size(), 2u);
    EXPECT_EQ(all[0].call + " " + all[1].call, "forward step");
    for (const bench::Measurement& m : all) {
      EXPECT_TRUE(m.check.good()) << m.check.fault << " [" << m.problem << "]";
      ASSERT_EQ(m.timings.size(), 2u);
      EXPECT_EQ(m.timings[0].name + " " + m.timings[1].name, "cadre products");
      EXPECT_GT(m.timings[0].us.median, 0);
    }
    // All products of these layers are equally large: 24 * 16 * 8 multiplications and additions.
    EXPECT_EQ(all[0].flops, layer.products_of_forward * 2 * 24 * 16 * 8) << layer.problem;
    EXPECT_EQ(all[1].flops, layer.products * 2 * 24 * 16 * 8) << layer.problem;
    const bool writes_dx = all[1].problem.find("dgrad=no") == std::string::npos;
    EXPECT_EQ(all[0].check.digest != all[1].check.digest, writes_dx) << layer.problem;
    EXPECT_EQ(all[0].plan, all[1].plan);
    EXPECT_EQ(all[0].kept_bytes, 0) << all[0].problem;
    EXPECT_GT(all[1].kept_bytes, 0) << all[1].problem;
  }
}

TEST(MeasureLayer, DoesNotTimeWhatIsNoNumber) {
  const auto all = bench::measure_layer("moe T=64 top_k=2 H=16 F=8 E=4 scale=3e38", kOnce);
  EXPECT_EQ(all[0].check.fault.find("y is no number at element "), 0u) << all[0].check.fault;
  EXPECT_TRUE(all[0].timings.empty());
}

/// A GPU that draws 100 W, whose time goes on when a contestant says so.
struct WarmAccelerator : test::HostAccelerator {
  double us = 0;
  std::vector<double> marks;

  void mark() override { marks.push_back(us); }
  std::vector<double> us_between_marks() override {
    std::vector<double> between;
    for (size_t i = 1; i < marks.size(); ++i) between.push_back(marks[i] - marks[i - 1]);
    marks.clear();
    return between;
  }
  std::optional<bench::PowerReading> power() override { return {{us / 1e4, 1500}}; }
};

TEST(Contest, CountsTheJoulesOfEachContestant) {
  WarmAccelerator gpu;
  int runs[2] = {};
  const auto contestant = [&](int i) {
    return bench::Peer{i ? "peer" : "cadre", "", [&, i] { ++runs[i], gpu.us += 1000 * (1 + i); }};
  };
  const auto timings =
      bench::contest({{contestant(0), contestant(1)}}, {.repeat = 1, .load_s = 0.02}, &gpu);
  EXPECT_NEAR(timings[0].joules, 0.1, 1e-9);
  EXPECT_NEAR(timings[1].joules, 0.2, 1e-9);
  EXPECT_EQ(timings[1].sm_mhz, 1500);
  EXPECT_NEAR(timings[0].watts, 100, 1e-6);
  EXPECT_EQ(timings[1].us.median, 2000);
  EXPECT_EQ(timings[1].speed, 2);
  EXPECT_GT(runs[0], 12);  // the load, one that warms up, one that is timed, 10 for the joules
  const auto cold = bench::contest({{contestant(0), contestant(1)}}, {.repeat = 1}, &gpu);
  EXPECT_EQ(cold[0].joules, 0);
}

}  // namespace
}  // namespace cadre
