// Ranks that are GPUs, or share the one that is emulated.
#include <gtest/gtest.h>

#include "bench/check_ranks.h"
#include "bench/ranks.h"
#include "cadre/device.h"
#include "cadre/error.h"
#include "cadre/expert_parallel.h"

using namespace cadre;

namespace {

TEST(ExpertParallelPlan, TakesFewTokensInOneKernelOnAGpu) {
  const Device gpu = parse_device("sm_90");
  const auto route = [&](std::string_view words, std::string_view only = {}) {
    return plan(parse_expert_parallel_problem(words), gpu, only).name;
  };
  constexpr std::string_view kFew = "expert_parallel T=256 top_k=8 H=64 E=512 ranks=2";
  EXPECT_EQ(route(kFew), "few_tokens");
  EXPECT_EQ(route(kFew, "window"), "window");
  EXPECT_EQ(route("expert_parallel T=257 top_k=8 H=64 E=512 ranks=2"), "window");
  EXPECT_EQ(route("expert_parallel T=256 top_k=8 H=64 E=513 ranks=2"), "window");
  const std::string codes = text(kFew, " x=mxfp8");
  EXPECT_EQ(route(codes), "few_tokens");
  EXPECT_EQ(route(codes, "window"), "window");
  EXPECT_EQ(route(codes + " push=yes"), "window");
  for (const std::string_view words : {kFew, std::string_view(codes)})
    EXPECT_NE(explain(plan(parse_expert_parallel_problem(words), gpu)).find("is one kernel"),
              std::string::npos);
}

class ExpertParallelOnDevice : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    bench::let_ranks_share_a_gpu();  // ranks share a GPU where there are fewer
    devices_ = cuda_devices();
    if (devices_.empty()) GTEST_SKIP() << "no GPU here";
  }
  std::vector<Device> devices_;
};

// Six routings each: ranks without tokens, without rows, all to one expert, absent tokens.
TEST_P(ExpertParallelOnDevice, HasTheBitsOfOneRankOnTheCpu) {
  const bool sums_at_home = std::string_view(GetParam()).find("sum=rank") != std::string::npos;
  for (const std::string_view route : {"", sums_at_home ? "window_sum_rank" : "window"}) {
    const bench::RanksReport report = bench::check_ranks(GetParam(), {}, devices_.front(), route);
    EXPECT_EQ(report.check.fault, "") << report.check.plan;
    EXPECT_EQ(report.routings, 6);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Problems, ExpertParallelOnDevice,
    testing::Values("expert_parallel T=64 top_k=2 H=64 E=3 ranks=2",
                    "expert_parallel T=1100 top_k=2 H=8 E=3 ranks=2 R=3000",
                    "expert_parallel T=16 top_k=8 H=512 E=65 ranks=8 tail=zero",
                    "expert_parallel T=128 top_k=8 H=64 E=128 ranks=2 R=2048",
                    "expert_parallel T=256 top_k=8 H=8 E=512 ranks=2 R=4096",
                    "expert_parallel T=20 top_k=40 H=8 E=33 ranks=2",
                    "expert_parallel T=1 top_k=1 H=8 E=1 ranks=1",
                    "expert_parallel T=400 top_k=2 H=64 E=3 ranks=2 dtype=f32",
                    "expert_parallel T=37 top_k=3 H=37 E=2 ranks=2 dtype=f32 tail=zero",
                    "expert_parallel T=40 top_k=4 H=4 E=5 ranks=2 dtype=f16 prob=no",
                    "expert_parallel T=64 top_k=2 H=256 E=4 ranks=2 R=90 overflow=drop",
                    "expert_parallel T=64 top_k=2 H=40 E=3 ranks=2 R=50",
                    "expert_parallel T=1100 top_k=2 H=8 E=3 ranks=2 push=yes",
                    "expert_parallel T=300 top_k=4 H=8 E=600 ranks=3 R=1500 overflow=drop push=yes",
                    "expert_parallel T=9 top_k=2 H=8 E=3 ranks=1 dtype=f32 push=yes",
                    "expert_parallel T=1100 top_k=2 H=40 E=3 ranks=2 sum=rank",
                    "expert_parallel T=9 top_k=3 H=37 E=2 ranks=3 R=40 dtype=f32 sum=rank",
                    "expert_parallel T=64 top_k=4 H=64 E=4 ranks=3 R=90 overflow=drop dtype=f16 "
                    "x=mxfp8 sum=rank",
                    "expert_parallel T=64 top_k=2 H=256 E=4 ranks=2 R=50 x=mxfp8",
                    "expert_parallel T=40 top_k=4 H=4160 E=3 ranks=2 x=mxfp8",
                    "expert_parallel T=3 top_k=2 H=8448 E=2 ranks=3 x=fp8_block tail=zero "
                    "scales_major=column",
                    "expert_parallel T=5 top_k=3 H=1090 E=400 ranks=2 dtype=f16 prob=no x=fp8_row",
                    "expert_parallel T=1100 top_k=2 H=32 E=3 ranks=2 x=fp8_block "
                    "scales_major=column",
                    "expert_parallel T=64 top_k=3 H=130 E=3 ranks=3 R=70 overflow=drop x=fp8_row "
                    "tail=zero push=yes"));

}  // namespace
