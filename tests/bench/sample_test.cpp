// Some elements of a large product: right ones pass, planted faults do not.
#include "bench/sample.h"

#include <gtest/gtest.h>

#include <cmath>

#include "bench/element.h"

namespace cadre {
namespace {

constexpr const char* kProblems[] = {
    "grouped_gemm fprop R=70 N=24 K=40 E=4 alpha=yes bias=yes bias_scale=yes",
    "grouped_gemm fprop R=70 N=24 K=40 E=4 bias=yes discrete_bias=yes rhs_major=column",
    "grouped_gemm dgrad R=70 N=24 K=40 E=4 format=f32 out=f32 beta=yes tail=zero lhs_major=column",
    "grouped_gemm dgrad R=70 N=24 K=40 E=4 discrete_rhs=yes out_major=column",
    "grouped_gemm wgrad R=70 N=24 K=40 E=4 out=f32 accumulate=per_expert alpha=yes",
    "grouped_gemm wgrad R=70 N=24 K=40 E=4 discrete_out=yes accumulate=yes",
    "grouped_gemm fprop R=70 N=24 K=40 E=4 gather=lhs T=35 top_k=2 bias=yes bias_scale=yes",
    "grouped_gemm wgrad R=70 N=24 K=40 E=4 gather=lhs T=35 top_k=2",
    "grouped_gemm wgrad R=70 N=24 K=40 E=4 gather=rhs T=9 top_k=3 accumulate=yes",
};

// A case after a run, with the sample that was drawn before it.
struct Done {
  bench::GroupedGemmCase data;
  bench::Sample sample;
};
Done done(const char* problem) {
  const bench::Draw draw{.offsets = "zipf:1", .live = 0.8, .row_gap = 3};
  auto c = bench::make_case(parse_grouped_gemm_problem(problem), draw);
  auto sample = bench::draw_sample(c, 4000, 7);
  const auto chosen = plan(c.problem, this_cpu());
  run(chosen, c.args, c.buffers->workspace(chosen.workspace_bytes), {});
  return {std::move(c), std::move(sample)};
}

TEST(Sample, RightResultsAreWithinTheirBounds) {
  for (const char* problem : kProblems) {
    const Done d = done(problem);
    EXPECT_EQ(d.sample.elements.size(), 4000u);
    const bench::Difference worst = bench::compare(d.data, d.sample);
    EXPECT_TRUE(worst.good()) << worst.where << " [" << problem << "]";
    EXPECT_GT(worst.of_bound, 0);
  }
}

TEST(Sample, SeesFaults) {
  for (const char* problem : kProblems) {
    const Done d = done(problem);
    const TensorView& v = d.data.outputs[0].view;
    const int64_t at = bench::offset_of(v, d.sample.elements[5].index);
    const float right = bench::load(v, at);
    for (const float wrong : {-right, right * 1.1f, 0.0f, std::nanf(""), INFINITY}) {
      bench::store(v, at, wrong);
      EXPECT_FALSE(bench::compare(d.data, d.sample).good()) << wrong << " [" << problem << "]";
    }
    bench::store(v, at, right);
    EXPECT_TRUE(bench::compare(d.data, d.sample).good());
    if (d.sample.tail.empty()) continue;
    bench::store(v, bench::offset_of(v, d.sample.tail[3]), 1);
    EXPECT_FALSE(bench::compare(d.data, d.sample).good()) << problem;
  }
}

TEST(Sample, RowOutputsHaveATailAndWeightsHaveNone) {
  EXPECT_FALSE(done(kProblems[0]).sample.tail.empty());
  EXPECT_TRUE(done(kProblems[4]).sample.tail.empty());
}

TEST(Sample, IsOfPlainFormats) {
  EXPECT_TRUE(bench::can_sample(parse_grouped_gemm_problem(kProblems[0])));
  EXPECT_FALSE(bench::can_sample(
      parse_grouped_gemm_problem("grouped_gemm fprop R=8 N=32 K=32 E=2 format=mxfp8")));
}

TEST(Sample, OfNoRowsIsEmpty) {
  auto c = bench::make_case(parse_grouped_gemm_problem("grouped_gemm fprop R=0 N=9 K=7 E=2"), {});
  EXPECT_TRUE(bench::draw_sample(c, 9, 1).elements.empty());
}

}  // namespace
}  // namespace cadre
