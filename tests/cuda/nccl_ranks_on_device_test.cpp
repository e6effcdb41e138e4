// Checks and benchmarks of ranks that are GPUs, by NCCL. tests/emulator/nccl_ranks_test.cpp has the
// same on emulated ones, by functions of its names.
#include <gtest/gtest.h>

#include "bench/check_ranks.h"
#include "bench/measure_ranks.h"
#include "cadre/error.h"

using namespace cadre;

namespace {

class NcclRanksOnDevice : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (cuda_devices().size() < 2) GTEST_SKIP() << "fewer than 2 GPUs here";
  }
  std::string words() const { return text("expert_parallel ranks=2 ", GetParam()); }
};

TEST_P(NcclRanksOnDevice, HaveTheBitsOfOneRankOnTheCpu) {
  const bench::RanksReport report =
      bench::check_ranks(words(), {}, cuda_devices().front(), "collective");
  EXPECT_EQ(report.check.fault, "");
  EXPECT_EQ(report.routings, 6);
}

TEST_P(NcclRanksOnDevice, AreTimed) {
  bench::MeasureOptions options;
  options.device = cuda_devices().front();
  options.only = "collective";
  options.contest.repeat = 20;
  options.contest.load_s = 0.1;
  const bool in_blocks = words().find("block") != std::string::npos;
  for (const bench::Measurement& m : bench::measure_ranks(words(), options)) {
    EXPECT_TRUE(m.check.good()) << m.check.fault;
    ASSERT_EQ(m.timings.size(), in_blocks ? 3u : 2u);
    for (const bench::Timing& t : m.timings) EXPECT_GT(t.us.median, 0);
    EXPECT_EQ(m.timings.back().name, in_blocks ? "cadre_graph" : "copy");
  }
}

INSTANTIATE_TEST_SUITE_P(Problems, NcclRanksOnDevice,
                         testing::Values("T=512 top_k=2 H=1024 E=4",
                                         "T=512 top_k=2 H=1024 E=4 block=1024",
                                         "T=512 top_k=2 H=1024 E=4 cross=choice",
                                         "T=64 top_k=3 H=37 E=2 R=300 dtype=f32 overflow=drop",
                                         "T=64 top_k=3 H=37 E=2 block=120 overflow=drop"));

// NCCL wants a GPU for each rank, and says so.
TEST(NcclRanksOnOneDevice, AreRefused) {
  if (cuda_devices().size() != 1) GTEST_SKIP() << "not one GPU here";
  EXPECT_THROW(bench::check_ranks("expert_parallel T=2 H=8 ranks=2", {}, cuda_devices().front(),
                                  "collective"),
               DeviceError);
}

}  // namespace
