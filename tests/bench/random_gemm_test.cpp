// Random grouped GEMMs on the CPU: what the test on the GPU draws is what it says, and can pass.
#include "bench/random_gemm.h"

#include <gtest/gtest.h>

#include "bench/check.h"

namespace cadre {
namespace {

TEST(RandomGemms, EveryKindIsDrawnOften) {
  constexpr const char* kKinds[] = {
      "fprop",         "dgrad",        "wgrad",     "discrete",   "alpha",       "beta",
      "bias",          "accumulate",   "budget",    "f32 out",    "tail zero",   "all in one",
      "empty experts", "ragged width", "R = 0",     "all tail",   "sum below R", "misaligned",
      "column major",  "f32 operand",  "two types", "activation", "gather",      "scatter"};
  bench::RandomGemms gemms(1);
  bench::Tally tally;
  for (int i = 0; i < 3000; ++i) bench::count(tally, gemms.next());
  for (const char* kind : kKinds) EXPECT_GE(tally[kind], 90) << kind;
  EXPECT_EQ(tally.size(), std::size(kKinds));
}

TEST(RandomGemms, TheCpuPassesThem) {
  bench::RandomGemms gemms(2);
  for (int i = 0; i < CADRE_RANDOM_PROBLEMS; ++i) {
    const bench::RandomGemm g = gemms.next();
    const bench::CheckReport report = bench::check(to_string(g.problem), g.draw);
    EXPECT_TRUE(report.good()) << report.fault << " [" << report.problem << "]";
  }
}

}  // namespace
}  // namespace cadre
