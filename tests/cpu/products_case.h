#pragma once
#include "cpu/gemm/ragged_contraction.h"
#include "cpu/gemm/ragged_rows.h"
#include "tests/ops/grouped_gemm_case.h"

// Runs of the CPU's grouped GEMM with means that no plan takes, whoever multiplies.
namespace cadre::test {

inline GroupedGemmProblem problem(std::string_view words, const Counts& counts) {
  GroupedGemmProblem p = parse_grouped_gemm_problem(text("grouped_gemm ", words));
  p.rows = counts.rows;
  p.experts = counts.experts();
  return p;
}

inline GemmCase::Result run_with(GemmCase& c, const cpu::gemm::Means& means) {
  using namespace cpu::gemm;
  const bool wgrad = c.p.pass == Pass::kWgrad;
  const int64_t bytes =
      wgrad ? ragged_contraction_bytes(c.p, means) : ragged_rows_bytes(c.p, means);
  return c.run_by(bytes, [&](const GroupedGemmArgs& args, Workspace workspace) {
    wgrad ? ragged_contraction(c.p, args, means, workspace)
          : ragged_rows(c.p, args, means, workspace);
  });
}

inline const Counts& long_counts() {
  static const Counts kCounts{.rows = 1700, .of = {5, 0, 900, 300, 1, 257, 33}};
  return kCounts;
}

/// Waves of the smallest size: experts span many of them. The bits are those of one wave.
inline void expect_waves_of_any_size_agree(
    cpu::gemm::ThreadProducts (*products)(cpu::gemm::Multiplicand)) {
  for (const char* words :
       {"fprop N=40 K=70 format=bf16", "dgrad N=300 K=40 format=f32", "wgrad N=40 K=70 format=f32",
        "wgrad N=150 K=40 format=mxfp8 out=f32", "wgrad N=40 K=70 format=nvfp4 out=f32",
        "wgrad N=40 K=64 format=f32 out=f32 accumulate=per_expert",
        "wgrad N=40 K=64 format=f32 out=bf16 accumulate=yes out_major=column"}) {
    GemmCase c(problem(words, long_counts()), long_counts(), 1);
    const auto want = run_with(c, {.threads = 2, .products = products});
    EXPECT_EQ(c.check(want), "") << words;
    for (const int64_t bytes : {1, 200'000, 400'000}) {
      const auto got = run_with(c, {.threads = 2, .wave_bytes = bytes, .products = products});
      EXPECT_EQ(got.out.bytes(), want.out.bytes()) << words << " in waves of " << bytes;
    }
  }
}

}  // namespace cadre::test
