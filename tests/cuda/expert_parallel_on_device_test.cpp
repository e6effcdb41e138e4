// Ranks that are GPUs: with fewer GPUs than ranks they share one.
#include <gtest/gtest.h>

#include "bench/check_ranks.h"
#include "cadre/device.h"

using namespace cadre;

namespace {

class ExpertParallelOnDevice : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    devices_ = cuda_devices();
#ifndef CADRE_EMULATED
    if (devices_.size() < 2) GTEST_SKIP() << "fewer than two GPUs here";
#endif
  }
  std::vector<Device> devices_;
};

// Six routings each: ranks without tokens, without rows, all to one expert, absent tokens.
TEST_P(ExpertParallelOnDevice, HasTheBitsOfOneRankOnTheCpu) {
  const bench::RanksReport report = bench::check_ranks(GetParam(), {}, devices_.front());
  EXPECT_EQ(report.check.fault, "");
  EXPECT_EQ(report.routings, 6);
}

INSTANTIATE_TEST_SUITE_P(
    Problems, ExpertParallelOnDevice,
    testing::Values("expert_parallel T=64 top_k=2 H=64 E=3 ranks=2",
                    "expert_parallel T=400 top_k=2 H=64 E=3 ranks=2 dtype=f32",
                    "expert_parallel T=37 top_k=3 H=37 E=2 ranks=2 dtype=f32 tail=zero",
                    "expert_parallel T=40 top_k=4 H=4 E=5 ranks=2 dtype=f16 prob=no",
                    "expert_parallel T=64 top_k=2 H=256 E=4 ranks=2 R=90 overflow=drop",
                    "expert_parallel T=64 top_k=2 H=40 E=3 ranks=2 R=50"));

}  // namespace
