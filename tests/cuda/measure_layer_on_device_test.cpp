// Timing of layers on a GPU: they run, and what runs beside them is their products alone.
#include <gtest/gtest.h>

#include "bench/measure.h"

namespace cadre {
namespace {

TEST(MeasureLayerOnDevice, TimesLayersBesideTheirProducts) {
  if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
  const bench::MeasureOptions options{.contest = {.repeat = 3, .load_s = 0.1},
                                      .device = cuda_devices()[0]};
  for (const char* problem :
       {"moe T=320 top_k=2 H=128 F=64 E=5", "grouped_mlp R=640 H=128 F=64 E=5"})
    for (const bench::Measurement& m : bench::measure_layer(problem, options)) {
      EXPECT_TRUE(m.check.good()) << m.check.fault << " [" << m.problem << "]";
      ASSERT_EQ(m.timings.size(), 2u);
      for (const bench::Timing& t : m.timings) {
        EXPECT_GT(t.us.p10, 0) << t.name;
        EXPECT_GE(t.joules, 0) << t.name;  // its counter ticks some times a second
      }
    }
}

TEST(MeasureLayerOnDevice, ProductsComputeNoActivation) {
  if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
  const bench::MeasureOptions options{.contest = {.repeat = 1, .load_s = 0},
                                      .device = cuda_devices()[0]};
  const std::string problem = "grouped_mlp R=80 H=96 F=72 E=3";
  const auto layer = bench::measure_layer(problem, options);
  const auto unfused = bench::measure_layer(problem + " weight_major=column", options);
  ASSERT_EQ(layer.size(), 2u);
  ASSERT_EQ(unfused.size(), 2u);
  for (size_t i = 0; i < layer.size(); ++i) {
    EXPECT_EQ(unfused[i].plan, "unfused");
    EXPECT_EQ(layer[i].plan, options.device.sm == 90 ? "fused" : "unfused");
    EXPECT_EQ(layer[i].flops, unfused[i].flops);
    EXPECT_EQ(layer[i].bytes, unfused[i].bytes) << layer[i].call;
  }
}

}  // namespace
}  // namespace cadre
