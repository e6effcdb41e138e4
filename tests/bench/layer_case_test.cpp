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
  EXPECT_TRUE(is_written(c.args.y, rows)) << words;
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
    expect_runs(bench::make_layer_case(p, this_cpu(), {}), p.rows, words);
  }
}

}  // namespace
}  // namespace cadre
