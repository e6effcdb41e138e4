// What oneDNN multiplies in the CPU grouped GEMM: small waves, and bf16 on a processor that would
// rather widen.
#include <gtest/gtest.h>

#include <dnnl.hpp>

#include "tests/cpu/products_case.h"

using namespace cadre;
using namespace cadre::cpu::gemm;
using test::Counts;
using test::GemmCase;
using test::problem;

namespace {

TEST(Waves, OfAnySizeGiveTheSameBits) { test::expect_waves_of_any_size_agree(onednn_products); }

TEST(Plans, SayWhereOnednnMultiplies) {
  const auto planned = [](std::string_view words) {
    const GroupedGemmProblem p = parse_grouped_gemm_problem(words);
    const GroupedGemmPlan made = plan(p, this_cpu());
    std::string all(made.name);
    for (const auto& [who, why] : made.refusals) all += text("; ", who, " ", why);
    return all;
  };
  EXPECT_TRUE(planned("grouped_gemm wgrad R=8 N=4 K=4 format=f32").starts_with("cpu_onednn;"));
  EXPECT_TRUE(planned("grouped_gemm wgrad R=8 N=4 K=4 format=mxfp8").starts_with("cpu_onednn;"));
  if (processor().free_tiles) {
    EXPECT_NE(planned("grouped_gemm dgrad R=8 N=4 K=4 format=f32")
                  .find("cpu_avx512 cpu_onednn multiplies these operands where they lie"),
              std::string::npos);
  }
}

GemmCase::Result run_with(GemmCase& c, int threads) {
  return test::run_with(c, {Multiplicand::kBf16, threads, Means::kWaveOfThread, onednn_products});
}

/// Whether oneDNN's bf16 products can be trusted here at all.
bool has_bf16() {
  const auto isa = dnnl::get_effective_cpu_isa();
  return processor().bf16 || isa == dnnl::cpu_isa::avx512_core_bf16;
}

TEST(Bf16Products, EveryPassLayoutAndFormat) {
  if (!has_bf16()) GTEST_SKIP() << "oneDNN may not use this processor's bf16 products";
  const Counts counts{.rows = 160, .of = {0, 7, 0, 70, 1, 64, 3}};
  for (const char* format : {"bf16", "fp8_tensor", "nvfp4"}) {
    for (const char* words : {"fprop N=37 K=45", "dgrad N=300 K=35", "wgrad N=37 K=100"}) {
      GemmCase c(problem(text(words, " out=f32 format=", format), counts), counts, 1);
      const auto result = run_with(c, 2);
      EXPECT_EQ(c.check(result), "") << to_string(c.p);
      EXPECT_EQ(run_with(c, 1).out.bytes(), result.out.bytes());
    }
  }
  for (const char* accumulate : {"no", "yes", "per_expert"}) {  // straight into dw
    GemmCase c(problem(text("wgrad N=150 K=128 accumulate=", accumulate), counts), counts, 1);
    EXPECT_EQ(c.check(run_with(c, 2)), "") << to_string(c.p);
  }
  for (const char* pass : {"fprop", "dgrad", "wgrad"})
    for (const char* majors : {"lhs_major=column", "rhs_major=column", "out_major=column",
                               "lhs_major=column rhs_major=column out_major=column"}) {
      GemmCase c(problem(text(pass, " N=37 K=96 ", majors), counts), counts, 1);
      EXPECT_EQ(c.check(run_with(c, 2)), "") << to_string(c.p);
    }
}

/// 32 MB of dw, which is written past the caches if its rows begin at cache lines.
TEST(Bf16Products, WeightGradientsLargerThanTheCaches) {
  if (!has_bf16()) GTEST_SKIP() << "oneDNN may not use this processor's bf16 products";
  const Counts counts{.rows = 340, .of = {0, 7, 270, 1, 62, 0, 0, 0}};
  for (int64_t gap : {0, 4}) {
    GemmCase c(problem("wgrad N=2048 K=1024", counts), counts, 1, {.out_gap = gap});
    EXPECT_EQ(c.check(run_with(c, 2)), "") << "gap " << gap;
  }
}

}  // namespace
