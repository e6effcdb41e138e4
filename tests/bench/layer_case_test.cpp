// The arguments that layers are timed with: every option has what it needs, outputs are written.
#include "bench/layer_case.h"

#include <gtest/gtest.h>

#include <cmath>

#include "bench/element.h"

namespace cadre {
namespace {

constexpr const char* kLinears[] = {
    "grouped_linear R=24 N=16 K=8 E=3",
    "grouped_linear R=24 N=16 K=8 E=3 weight_major=column dw=f32",
    "grouped_linear R=24 N=16 K=8 E=3 bias=yes bias_scale=yes accumulate=device "
    "accumulate_bias=per_expert",
    "grouped_linear R=24 N=16 K=8 E=3 bias=yes discrete_weight=yes discrete_bias=yes "
    "discrete_dw=yes recipe=mxfp8 cache_weights=yes",
};
constexpr const char* kMlps[] = {
    "grouped_mlp R=24 H=16 F=8 E=3",
    "grouped_mlp R=24 H=16 F=8 E=3 act=relu prob=yes bias1=yes bias2=yes bias2_scale=yes "
    "accumulate=per_expert discrete_weight=yes discrete_dw=yes",
    "grouped_mlp R=24 H=16 F=8 E=3 prob=yes recipe=nvfp4 accumulate=yes keep_h=yes",
};

constexpr const char* kMoes[] = {
    "moe T=12 top_k=2 H=16 F=8 E=3",
    "moe T=12 top_k=2 H=16 F=8 E=3 shared_F=24 shared_gate=yes",
    "moe T=12 top_k=2 H=16 F=8 E=3 act=relu score=sigmoid expert_bias=yes bias1=yes bias2=yes "
    "accumulate=per_expert discrete_weight=yes discrete_dw=yes keep_rows=no",
    "moe T=12 top_k=2 H=16 F=8 E=3 recipe=nvfp4 logits=bf16 dlogits=no accumulate=yes",
};

// Whether all of the first `live` rows were written: outputs begin as NaN.
bool is_written(const TensorView& v, int64_t live) {
  for (int64_t i = 0; i < live * v.shape[1]; ++i)
    if (!std::isfinite(bench::load(v, bench::offset_of(v, i)))) return false;
  return true;
}

template <class Case>
void expect_runs(const Case& c, int64_t rows, const char* words) {
  forward(c.plan, c.args, c.workspace, {});
  backward(c.plan, c.args, c.workspace, {});
  const auto& out = [&]() -> const TensorView& {
    if constexpr (requires { c.args.out; })
      return c.args.out;
    else
      return c.args.y;
  }();
  EXPECT_TRUE(is_written(out, rows)) << words;
  EXPECT_TRUE(is_written(c.args.dx, rows)) << words;
  EXPECT_TRUE(c.buffers->canaries_live()) << words;
}

TEST(LayerCase, LinearsRun) {
  for (const char* words : kLinears) {
    const auto p = parse_grouped_linear_problem(words);
    expect_runs(bench::make_layer_case(p, this_cpu(), {}), p.rows, words);
  }
}

TEST(LayerCase, MlpsRun) {
  for (const char* words : kMlps) {
    const auto p = parse_grouped_mlp_problem(words);
    const auto c = bench::make_layer_case(p, this_cpu(), {});
    EXPECT_EQ(c.args.dprob != nullptr, p.prob) << words;
    expect_runs(c, p.rows, words);
  }
}

TEST(LayerCase, LayersOfExpertsRun) {
  for (const char* words : kMoes) {
    const auto p = parse_moe_problem(words);
    const auto c = bench::make_layer_case(p, this_cpu(), {});
    expect_runs(c, p.tokens, words);
    EXPECT_TRUE(!p.dlogits || is_written(c.args.dlogits, p.tokens)) << words;
  }
}

// Tokens fall to experts as the distribution says.
TEST(LayerCase, LogitsFollowTheDraw) {
  constexpr int kExperts = 8;
  constexpr int64_t kTokens = 4000;
  std::vector<float> numbers(size_t(kTokens * kExperts));
  const TensorView logits = view(numbers.data(), DType::kF32, {kTokens, kExperts});
  for (const char* words : {"uniform", "zipf:1", "gamma:1", "onehot"}) {
    const bench::Draw draw{.seed = 5, .offsets = words};
    bench::fill_logits(logits, draw);
    const auto d = bench::parse_distribution(words, kExperts, draw.seed);
    double sum = 0;
    for (double w : d.weights) sum += w;
    std::vector<double> chosen(kExperts);
    for (int64_t t = 0; t < kTokens; ++t) {
      const float* of = numbers.data() + t * kExperts;
      for (int e = 0; e < kExperts; ++e) EXPECT_TRUE(std::isfinite(of[e])) << words;
      ++chosen[size_t(std::max_element(of, of + kExperts) - of)];
    }
    for (size_t e = 0; e < kExperts; ++e) {
      const double want = double(kTokens) * d.weights[e] / sum;
      EXPECT_NEAR(chosen[e], want, 5 * std::sqrt(want) + 1e-3) << words << " expert " << e;
    }
  }
}

}  // namespace
}  // namespace cadre
