// Timing on a GPU: what is timed is right, peers do not spoil it, and every contestant has times.
#include "bench/measure.h"

#include <gtest/gtest.h>

#include "cadre/error.h"
#include "cadre/grouped_gemm.h"

namespace cadre {
namespace {

constexpr const char* kProblems[] = {
    "grouped_gemm fprop R=640 N=256 K=128 E=5 format=bf16 tail=zero",
    "grouped_gemm dgrad R=640 N=256 K=128 E=5 format=bf16 discrete_rhs=yes",
    "grouped_gemm wgrad R=640 N=256 K=128 E=5 format=bf16 discrete_out=yes",
    "grouped_gemm wgrad R=640 N=256 K=128 E=5 format=bf16 out=f32 accumulate=yes",
    "grouped_gemm wgrad R=640 N=256 K=128 E=5 format=bf16 out=f32 accumulate=per_expert",
};

bool is_taken(const char* problem, const Device& device) {
  try {
    plan(parse_grouped_gemm_problem(problem), device);
    return true;
  } catch (const Unsupported&) {
    return false;
  }
}

TEST(MeasureOnDevice, ChecksThenTimesBesidePeers) {
  if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
  bench::MeasureOptions options;
  options.device = cuda_devices()[0];
  options.contest.repeat = 3;
  int taken = 0;
  for (const char* problem : kProblems)
    for (const char* offsets : {"uniform", "zipf:1", "onehot"}) {
      if (!is_taken(problem, options.device)) continue;
      ++taken;
      options.draw.offsets = offsets;
      const bench::Measurement m = bench::measure(problem, options);
      EXPECT_TRUE(m.check.good()) << m.check.fault << " [" << problem << "]";
      EXPECT_EQ(m.checked_elements, 4096);
      ASSERT_EQ(m.timings.size(), m.absent_peers.empty() ? 3u : 1u) << m.absent_peers;
      EXPECT_EQ(m.timings[0].name, "cadre");
      for (const bench::Timing& t : m.timings) EXPECT_GT(t.us.p10, 0) << t.name;
    }
  if (taken == 0) GTEST_SKIP() << "no implementation on the GPU yet";
}

}  // namespace
}  // namespace cadre
