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
    {"grouped_linear R=24 N=16 K=8 E=3 recipe=mxfp8 quantized_x=yes given_dy_along_k=yes", 3, 1},
    {"grouped_mlp R=24 H=16 F=8 E=3 act=relu prob=yes wgrad1=no", 5, 2},
    {"moe T=12 top_k=2 H=16 F=8 E=3 act=relu", 6, 2},
    {"moe T=12 top_k=2 H=16 F=8 E=3 act=relu deferred=yes keep_rows=no dgrad=no", 5, 2},
    {"moe T=12 top_k=2 H=16 F=8 E=3 act=relu shared_F=16 shared_gate=yes", 12, 4},
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
    EXPECT_NE(all[0].check.digest, all[1].check.digest) << layer.problem;
    EXPECT_EQ(all[0].plan, all[1].plan);
    EXPECT_EQ(all[0].kept_bytes, 0) << all[0].problem;
    EXPECT_GT(all[1].kept_bytes, 0) << all[1].problem;
  }
}

TEST(MeasureLayer, TimesOneStepAndFourThatShareQuantisedWeights) {
  bench::MeasureOptions options = kOnce;
  options.beside = "recipe=bf16 cache_weights=no";
  const std::string problem = "grouped_mlp R=24 H=16 F=8 E=3 act=relu recipe=mxfp8";
  const auto each = bench::measure_layer(problem, kOnce);
  const auto all = bench::measure_layer(problem + " cache_weights=yes", options);
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[0].call + ", " + all[1].call + ", " + all[2].call, "forward, step, 4 steps");
  EXPECT_EQ(all[0].flops, each[0].flops);
  EXPECT_EQ(all[1].flops, each[1].flops);
  EXPECT_EQ(all[2].flops, 4 * each[1].flops);
  for (const bench::Measurement& m : all) {
    EXPECT_TRUE(m.check.good()) << m.check.fault << " [" << m.problem << "]";
    ASSERT_EQ(m.timings.size(), 3u);
    EXPECT_EQ(m.timings[2].name, "cadre recipe=bf16 cache_weights=no");
    EXPECT_NE(m.timings[2].what.find("recipe=bf16"), std::string::npos) << m.timings[2].what;
    EXPECT_EQ(m.timings[2].what.find("cache_weights"), std::string::npos) << m.timings[2].what;
  }
}

TEST(MeasureLayer, DoesNotTimeWhatIsNoNumber) {
  const auto all = bench::measure_layer("moe T=64 top_k=2 H=16 F=8 E=4 scale=3e38", kOnce);
  EXPECT_EQ(all[0].check.fault.find("y is no number at element "), 0u) << all[0].check.fault;
  EXPECT_TRUE(all[0].timings.empty());
  // What only backward writes; out is f32 and has room for such numbers.
  const std::string big = "moe T=64 top_k=2 H=16 F=8 E=4 recipe=f32 dtype=f32 scale=1e9 dgrad=no ";
  for (const auto& [words, fault] :
       {std::pair("dw=f32 logits=f16", "dlogits is no number at "),
        std::pair("dw=f16 dlogits=no", "dw is no number at "),
        std::pair("dw=f32 dlogits=no bias1=yes dbias_dtype=f16 wgrad1=no",
                  "dbias is no number at ")}) {
    const auto layer = bench::measure_layer(big + words, kOnce);
    EXPECT_EQ(layer[0].check.fault, "") << words;
    EXPECT_EQ(layer[1].check.fault.find(fault), 0u) << layer[1].check.fault << " of " << words;
    EXPECT_TRUE(layer[1].timings.empty()) << words;
  }
}

// A step that adds to its gradients, or that has few of them, is good.
TEST(MeasureLayer, LooksAtWhatAStepWritesAnew) {
  for (const char* problem :
       {"grouped_linear R=24 N=16 K=8 E=5 bias=yes bias_scale=yes accumulate=yes "
        "accumulate_bias=yes",
        "grouped_linear R=24 N=16 K=8 E=5 bias=yes bias_scale=yes dbias=no discrete_dw=yes",
        "grouped_linear R=24 N=16 K=8 E=5 bias=yes return_bias=yes weight_major=column",
        "grouped_mlp R=24 H=16 F=8 E=5 prob=yes bias2=yes bias2_scale=yes dbias=no wgrad2=no",
        "moe T=3 top_k=1 H=16 F=8 E=40 bias1=yes bias2=yes accumulate=device",
        "moe T=9 top_k=2 H=16 F=8 E=2 shared_F=24 shared_gate=yes dlogits=no",
        "sequential | grouped_linear R=24 N=8 K=16 E=3 bias=yes | activation forward relu R=24 F=8 "
        "E=3 prob=yes | grouped_linear R=24 N=16 K=8 E=3",
        "sequential | grouped_linear R=24 N=8 K=16 E=3 dgrad=no wgrad=no | activation forward relu "
        "R=24 F=8 E=3 | grouped_linear R=24 N=16 K=8 E=3 dgrad=no"})
    for (const bench::Measurement& m : bench::measure_layer(problem, kOnce))
      EXPECT_EQ(m.check.fault, "") << m.call << " of " << problem;
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

TEST(Contest, WarmsUpOnAHostThatIsSlowerThanItsLoad) {
  WarmAccelerator gpu;
  int runs = 0;
  const bench::Peer contestant{"cadre", "", [&] { ++runs, gpu.us += 1000; }};
  bench::contest({{contestant}}, {.repeat = 1, .load_s = 1e-9}, &gpu);
  EXPECT_EQ(runs, 4);  // the load, one that warms up, one that is timed, one for the joules
}

}  // namespace
}  // namespace cadre
