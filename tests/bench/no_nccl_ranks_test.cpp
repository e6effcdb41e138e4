// Ranks that are GPUs have no engine in a build without NCCL, and are told so before they start.
#include <gtest/gtest.h>

#include "bench/check_ranks.h"
#include "bench/measure_ranks.h"
#include "bench/nccl_engine.h"
#include "bench/rank_route.h"
#include "tests/judge/errors.h"

using namespace cadre;

namespace {

constexpr std::string_view kProblem = "expert_parallel T=8 top_k=2 H=8 E=2 ranks=2 R=32 dtype=bf16";

std::string words_for(std::string_view device) {
  return text("expert_parallel: ranks on ", device,
              " exchange rows by NCCL, which this build has not; configure with -DCADRE_CUDA=ON "
              "-DCADRE_NCCL=ON, or take --device cpu [",
              kProblem, "]");
}

TEST(NoNcclRanks, AreToldWhatToBuild) {
  ExpertParallelPlan plan{.problem = parse_expert_parallel_problem(kProblem)};
  plan.device = parse_device("sm_90");
  EXPECT_EQ(test::unsupported([&] { bench::require_nccl(plan); }), words_for("sm_90"));
}

TEST(NoNcclRanks, AreRefusedByCheckAndBench) {
  if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
  const Device gpu = cuda_devices().front();
  const std::string want = words_for(to_string(gpu));
  EXPECT_EQ(test::unsupported([&] { bench::plan_of_ranks(kProblem, gpu, "collective"); }), want);
  EXPECT_EQ(test::unsupported([&] { bench::check_ranks(kProblem, {}, gpu, "collective"); }), want);
  bench::MeasureOptions options;
  options.device = gpu;
  options.only = "collective";
  EXPECT_EQ(test::unsupported([&] { bench::measure_ranks(kProblem, options); }), want);
  EXPECT_NE(bench::plan_of_ranks(kProblem, gpu, "").name, bench::kCollective);
}

}  // namespace
