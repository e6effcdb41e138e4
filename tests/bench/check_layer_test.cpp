// Layers on random data, run twice: what they compute is hashed, on a copy as on the case itself.
#include "bench/check_layer.h"

#include <gtest/gtest.h>

#include <set>

#include "bench/compare.h"
#include "bench/layer_case.h"
#include "tests/bench/host_accelerator.h"

namespace cadre {
namespace {

// What the outputs of each are must differ.
constexpr const char* kLayers[] = {
    "grouped_linear R=44 N=16 K=8 E=3",
    "grouped_linear R=44 N=16 K=8 E=3 recipe=mxfp8",
    "grouped_linear R=44 N=16 K=8 E=3 recipe=fp8_tensor",
    "grouped_linear R=44 N=16 K=8 E=3 tail=zero",
    "grouped_linear R=44 N=16 K=8 E=3 wgrad=no",
    "grouped_linear R=44 N=16 K=8 E=3 accumulate=yes",
    "grouped_linear R=44 N=16 K=8 E=3 bias=yes bias_scale=yes",
    "grouped_linear R=44 N=16 K=8 E=3 bias=yes dbias=no",
    "grouped_mlp R=44 H=16 F=8 E=3 prob=yes",
    "grouped_mlp R=44 H=16 F=8 E=3 prob=yes dprob=no",
    "grouped_mlp R=44 H=16 F=8 E=3 bias1=yes bias2=yes bias2_scale=yes",
    "moe T=22 top_k=2 H=16 F=8 E=3",
    "moe T=22 top_k=2 H=16 F=8 E=3 normalize=yes bias1=yes bias2=yes",
    "moe T=22 top_k=2 H=16 F=8 E=3 dlogits=no",
    "moe T=22 top_k=2 H=16 F=8 E=3 shared_F=24",
    "moe T=22 top_k=2 H=16 F=8 E=3 shared_F=24 shared_gate=yes",
    "sequential | grouped_linear R=44 N=16 K=8 E=3 bias=yes bias_scale=yes | activation forward "
    "swiglu R=44 F=8 E=3 prob=yes | grouped_linear R=44 N=24 K=8 E=3",
    "sequential | activation forward gelu R=44 F=8 E=3 prob=yes | grouped_linear R=44 N=16 K=8 E=3 "
    "dgrad=no",
    "grouped_linear R=44 N=16 K=8 E=3 recipe=mxfp8 quantized_x=yes",
    "grouped_linear R=44 N=16 K=8 E=3 recipe=fp8_block quantized_x=yes wgrad=no",
    "grouped_linear R=44 N=16 K=8 E=3 recipe=fp8_block given_x_along_k=yes given_dy_along_k=yes",
    "grouped_mlp R=44 H=16 F=8 E=3 recipe=mxfp8 quantized_x=yes",
    "grouped_mlp R=44 H=16 F=8 E=3 recipe=fp8_block given_x_along_k=yes",
};
// What the outputs of each pair are must not.
constexpr const char* kEqual[][2] = {
    {kLayers[0], "grouped_linear R=44 N=16 K=8 E=3 deferred=yes discrete_dw=yes"},
    {kLayers[1], "grouped_linear R=44 N=16 K=8 E=3 recipe=mxfp8 save_input=yes deferred=yes"},
    {kLayers[1], "grouped_linear R=44 N=16 K=8 E=3 recipe=mxfp8 cache_weights=yes"},
    {kLayers[8], "grouped_mlp R=44 H=16 F=8 E=3 prob=yes deferred=yes keep_h=yes"},
    {kLayers[11], "moe T=22 top_k=2 H=16 F=8 E=3 deferred=yes keep_rows=no"},
};
const bench::Draw kDraw{.seed = 3, .live = 0.9};

std::string digest_of(const char* problem, const bench::Draw& draw = kDraw) {
  const bench::CheckReport r = bench::check_layer(problem, draw);
  EXPECT_TRUE(r.good()) << r.fault << " [" << problem << "]";
  return r.digest.text();
}

TEST(CheckLayer, HashesWhatIsComputed) {
  std::set<std::string> seen;
  for (const char* problem : kLayers) {
    EXPECT_TRUE(seen.insert(digest_of(problem)).second) << problem;
    EXPECT_EQ(digest_of(problem), digest_of(problem)) << problem;
    EXPECT_NE(digest_of(problem), digest_of(problem, {.seed = 4, .live = 0.9})) << problem;
  }
  for (const auto& [one, other] : kEqual) EXPECT_EQ(digest_of(one), digest_of(other)) << other;
}

// Bytes of all outputs.
template <class AnyCase>
std::vector<std::vector<std::byte>> results(const AnyCase& c) {
  std::vector<std::vector<std::byte>> all;
  for (const bench::Output& out : c.outputs) all.push_back(bench::snapshot(out));
  return all;
}

TEST(CheckLayer, WhatRunsOnACopyEqualsWhatRunsOnTheCase) {
  for (const char* words : kLayers)
    bench::visit_layer(words, [&](const auto& problem) {
      auto want = bench::make_layer_case(problem, this_cpu(), kDraw);
      auto got = bench::make_layer_case(problem, this_cpu(), kDraw);
      const auto before = results(got);
      forward(want.plan, want.args, want.workspace, {});
      backward(want.plan, want.args, want.workspace, {});
      test::HostAccelerator accelerator;
      const bench::Mirror mirror(*got.buffers, accelerator);
      const auto args = bench::moved(mirror, got);
      forward(got.plan, args, mirror.moved(got.workspace), {});
      backward(got.plan, args, mirror.moved(got.workspace), {});
      EXPECT_EQ(results(got), before) << "the case itself was written: " << words;
      mirror.fetch();
      EXPECT_EQ(results(got), results(want)) << words;
    });
}

}  // namespace
}  // namespace cadre
