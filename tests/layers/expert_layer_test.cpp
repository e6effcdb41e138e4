// The way of a batch through a whole expert layer and back, with offsets and maps that only the
// machine knows: each step has the bits of the CPU's from the same input, the expert MLP is within
// its bound, and a recording follows the router wherever it sends the tokens.
#include "tests/layers/expert_layer_case.h"

#include "tests/judge/on_machine.h"
#include "tests/layers/expert_layer_copy.h"
#include "tests/layers/mlp_check.h"

using namespace cadre;
using test::byte_difference;
using test::ExpertLayerCase;
using test::ExpertLayerCopy;
using test::ExpertLayerSizes;
using test::LayerStage;
using test::Tensor;

namespace {

constexpr int64_t kStep = 8;

ExpertLayerSizes sizes(bool weighs_rows, int64_t dropped) {
  ExpertLayerSizes s{.tokens = 37, .top_k = 3, .dropped = dropped};
  s.mlp.hidden = 24;
  s.mlp.features = 16;
  s.mlp.experts = 7;
  s.mlp.prob = weighs_rows;
  s.mlp.bias1 = s.mlp.bias2 = true;
  s.mlp.parameters.dw = DType::kF32;
  return s;
}

struct ExpertLayer : test::OnMachine {
  test::MadeFor here() const { return {machine->device(), kStep}; }

  /// Every step around the MLP again by the CPU, from what the machine had.
  void expect_cpu_bits(ExpertLayerCase& got, const ExpertLayerSizes& s) {
    ExpertLayerCase want(s, 1, {this_cpu(), kStep});
    for (LayerStage stage : test::kLayerStages) {
      want.take(got);
      for (Tensor* t : want.outputs(stage)) t->poison();
      if (stage == LayerStage::kPlace)
        std::fill(want.mlp.offsets.begin(), want.mlp.offsets.end(), -1);
      want.launch(stage, [](auto args) { return args; }, {});
      const std::vector<Tensor*> a = got.outputs(stage), b = want.outputs(stage);
      for (size_t i = 0; i < a.size(); ++i)
        EXPECT_EQ(a[i]->bytes() == b[i]->bytes(), true) << "step " << int(stage) << " output " << i;
      EXPECT_EQ(got.mlp.offsets, want.mlp.offsets);
    }
  }
};

TEST_F(ExpertLayer, IsItsStepsOneByOne) {
  for (bool weighs_rows : {false, true})
    for (int64_t dropped : {0, 13}) {
      const ExpertLayerSizes s = sizes(weighs_rows, dropped);
      ExpertLayerCase c(s, 2, here());
      c.mlp.shows_inside = true;
      ExpertLayerCopy layer(*machine, c);
      machine->run([&](Stream stream) { layer.step(stream); });
      layer.memory().fetch();
      EXPECT_EQ(layer.memory().damage(), "");
      expect_cpu_bits(c, s);
      c.take_counts();
      EXPECT_EQ(c.mlp.counts.used(), c.rows());
      test::MlpCheck(c.mlp, c.mlp).check();
    }
}

TEST_F(ExpertLayer, ARecordingFollowsTheRouter) {
  const ExpertLayerSizes s = sizes(true, 13);
  ExpertLayerCase first(s, 3, here());
  ExpertLayerCopy live(*machine, first);
  machine->run([&](Stream stream) { live.step(stream); });
  const auto graph = machine->record([&](Stream stream) { live.step(stream); });
  std::vector<std::vector<int32_t>> offsets;
  std::vector<double> skews = {0.0, 1.0, -1.0, 0.3, 0.1};
  skews.resize(size_t(machine->draws(5)));
  for (double skew : skews) {
    const unsigned seed = 4 + unsigned(offsets.size());
    ExpertLayerCase want(s, seed, here(), skew), got(s, seed, here(), skew);
    ExpertLayerCopy eager(*machine, want), own(*machine, got);
    machine->run([&](Stream stream) { eager.step(stream); });
    eager.memory().fetch();
    live.memory().upload_from(own.memory());
    graph->replay();
    own.memory().fetch_from(live.memory());
    EXPECT_EQ(byte_difference(got, want), "") << "skew " << skew;
    offsets.push_back(got.mlp.offsets);
  }
  for (size_t i = 1; i < offsets.size(); ++i) EXPECT_NE(offsets[i], offsets[0]);
}

}  // namespace
