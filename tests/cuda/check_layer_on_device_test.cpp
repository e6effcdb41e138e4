// Layers on a GPU, run twice on equal random data: equal bits, which a hash tells from others.
#include "bench/check_layer.h"

#include <gtest/gtest.h>

#include <set>

namespace cadre {
namespace {

constexpr const char* kLayers[] = {
    "grouped_linear R=90 N=64 K=40 E=3 recipe=bf16 discrete_weight=yes",
    "grouped_linear R=90 N=64 K=40 E=3 recipe=f16 dtype=f16 weight=f16 dw=f32 accumulate=yes "
    "deferred=yes bias=yes bias_scale=yes",
    "grouped_mlp R=90 H=40 F=32 E=3 recipe=f32 dtype=f32 weight=f32 dw=f32 prob=yes",
    "moe T=30 top_k=3 H=40 F=32 E=5 bias1=yes bias2=yes normalize=yes",
    "moe T=30 top_k=3 H=40 F=32 E=5 shared_F=64 shared_gate=yes keep_rows=no",
    "sequential | grouped_linear R=90 N=64 K=40 E=3 bias=yes bias_scale=yes | activation forward "
    "swiglu R=90 F=32 E=3 prob=yes | grouped_linear R=90 N=24 K=32 E=3",
};

TEST(CheckLayerOnDevice, HashesWhatIsComputed) {
  if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
  const Device gpu = cuda_devices().front();
  std::set<std::string> seen;
  for (const char* problem : kLayers) {
    const bench::Draw draw{.seed = 3, .live = 0.9};
    const bench::CheckReport r = bench::check_layer(problem, draw, gpu);
    EXPECT_TRUE(r.good()) << r.fault << " [" << problem << "]";
    EXPECT_TRUE(seen.insert(r.digest.text()).second) << problem;
    EXPECT_EQ(bench::check_layer(problem, draw, gpu).digest, r.digest) << problem;
  }
}

}  // namespace
}  // namespace cadre
