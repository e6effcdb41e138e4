// The whole model on the library's layers: its gradient against differences, equal bits for any
// number of threads and after a resume, for every recipe.
#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "apps/train/checkpoint.h"
#include "apps/train/random.h"
#include "apps/train/sample.h"
#include "apps/train/session.h"
#include "apps/train/trainer.h"
#include "cadre/recipe.h"
#include "tests/apps/train/differences.h"
#include "tests/apps/train/folder.h"
#include "tests/judge/errors.h"

using namespace cadre;
using namespace cadre::train;
using cadre::test::Folder;
using cadre::test::invalid;
using cadre::test::prose;

namespace {

Settings tiny() {
  Settings s;
  s.window = 3;
  s.hidden = 32;
  s.features = 48;
  s.experts = 5;
  s.blocks = 2;
  s.rows = 40;
  s.steps = 6;
  s.eval_every = 2;
  return s;
}

/// Tests run side by side, so one thread is enough where a test does not say otherwise.
class Threads {
 public:
  explicit Threads(int threads) : before_(omp_get_max_threads()) { omp_set_num_threads(threads); }
  ~Threads() { omp_set_num_threads(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int before_;
};

Engine& cpu() {
  static const std::unique_ptr<Engine> engine = open_engine(this_cpu());
  return *engine;
}

Network network_of(const Settings& s, const char* recipe, int64_t rows, Mode mode) {
  return Network({s, parse_recipe(recipe), rows, mode}, cpu());
}

/// Any bytes, and seeds for the rounding.
void fill(Batch& batch) {
  for (size_t i = 0; i < batch.windows().size(); ++i) {
    batch.windows()[i] = static_cast<uint8_t>(random_word({5, 1, i}) % 90);
  }
  for (size_t i = 0; i < batch.targets().size(); ++i) {
    batch.targets()[i] = static_cast<uint8_t>(random_word({5, 2, i}) % 90);
  }
  for (size_t i = 0; i < batch.rng().size(); ++i) batch.rng()[i] = i;
  batch.send();
}

double loss_of(Network& network, const Weights& weights) {
  double loss = 0;
  network.add_loss(weights.list(), network.shape().rows, &loss);
  return loss;
}

std::span<const float> gradient(const Weights& weights, size_t which) {
  const Weight& weight = weights.list()[which];
  return {weight.grad, static_cast<size_t>(weight.count)};
}

Corpus some_corpus(const Folder& folder) {
  return read_corpus({folder.write("text", prose(4000))}, 0.1);
}

std::vector<uint8_t> trained(const Corpus& corpus, RunState state, int64_t until) {
  Trainer trainer(cpu(), corpus, std::move(state));
  while (trainer.step() < until) trainer.advance();
  if (trainer.done()) trainer.finish();
  return checkpoint_content(trainer.state());
}

}  // namespace

class EveryRecipe : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Train, EveryRecipe,
                         testing::Values("f32", "bf16", "f16", "fp8_tensor", "fp8_block", "mxfp8",
                                         "nvfp4", "mxfp4"),
                         [](const auto& each) { return each.param; });

TEST(Network, HasTheGradientOfDifferences) {
  const Threads one(1);
  Settings s = tiny();
  s.balance = 0;
  s.experts = s.top_k = 3;  // all experts, so that no step changes the choice
  std::vector<Parameter> parameters = initial_parameters(s);
  // A head of zero mean and small weights has tiny gradients behind it; make it count.
  for (float& w : parameters[head_weight(s)].value) w *= 20;
  const Weights weights(cpu(), parameters);
  Network network = network_of(s, "f32", s.rows, Mode::kTrain);
  fill(network.batch());
  loss_of(network, weights);
  network.backward(weights.list());
  for (size_t i = 0; i < parameters.size(); ++i) {
    Parameter& p = parameters[i];
    // Along its own gradient the loss rises by the gradient's norm for a step of length one.
    const std::vector<float> kept = p.value;
    const std::span<const float> grad = gradient(weights, i);
    double squares = 0;
    for (const float g : grad) squares += double(g) * double(g);
    const double norm = std::sqrt(squares), step = 2e-3;
    ASSERT_GT(norm, 0) << p.name;
    const auto at = [&](double length) {
      for (size_t j = 0; j < kept.size(); ++j) {
        p.value[j] = kept[j] + static_cast<float>(length * double(grad[j]) / norm);
      }
      return loss_of(network, weights);
    };
    const double slope = (at(step) - at(-step)) / (2 * step);
    p.value = kept;
    // fp32 losses near 200 have steps of 1e-5; over 4e-3 that is 4e-3 of a slope of one.
    EXPECT_NEAR(slope, norm, 0.01 * norm + 0.01) << p.name;
  }
}

TEST(Network, SendsTheBalanceToTheRouter) {
  Settings s = tiny();
  std::vector<Parameter> parameters = initial_parameters(s);
  const Weights without(cpu(), parameters), with(cpu(), parameters);
  for (const Weights* weights : {&without, &with}) {
    s.balance = weights == &with ? 0.5 : 0;
    Network network = network_of(s, "f32", s.rows, Mode::kTrain);
    fill(network.batch());
    loss_of(network, *weights);
    network.backward(weights->list());
  }
  const auto equal = [&](size_t which) {
    return std::ranges::equal(gradient(with, which), gradient(without, which));
  };
  EXPECT_FALSE(equal(block_parameter(s.blocks - 1, kRouter)));
  EXPECT_TRUE(equal(block_parameter(s.blocks - 1, kW1)));
}

TEST(Network, ScoresARowTheSameInAnyBatch) {
  const Threads one(1);
  const Folder folder;
  const Corpus corpus = some_corpus(folder);
  const Settings s = tiny();
  const auto parameters = initial_parameters(s);
  const Weights weights(cpu(), parameters);
  Network wide = network_of(s, "bf16", 64, Mode::kPredict);
  Network narrow = network_of(s, "bf16", 7, Mode::kPredict);
  EXPECT_NEAR(held_out_bits(wide, weights.list(), corpus),
              held_out_bits(narrow, weights.list(), corpus), 1e-12);
}

TEST(Network, ForgetsQuantizedWeightsWhenAsked) {
  const Settings s = tiny();
  std::vector<Parameter> parameters = initial_parameters(s);
  const Weights weights(cpu(), parameters);
  Network network = network_of(s, "mxfp8", s.rows, Mode::kPredict);
  fill(network.batch());
  const double before = loss_of(network, weights);
  for (float& w : parameters[block_parameter(0, kW1)].value) w *= 2;
  EXPECT_EQ(loss_of(network, weights), before);
  network.forget_weights();
  EXPECT_NE(loss_of(network, weights), before);
}

TEST_P(EveryRecipe, HasTheSameBitsForAnyThreads) {
  const Folder folder;
  const Corpus corpus = some_corpus(folder);
  const RunState start = initial_state(tiny(), GetParam());
  const auto with = [&](int count) {
    const Threads threads(count);
    return trained(corpus, start, 4);
  };
  EXPECT_TRUE(with(1) == with(3));
}

TEST_P(EveryRecipe, GoesOnFromACheckpointWithEqualBits) {
  const Threads one(1);
  const Folder folder;
  const Corpus corpus = some_corpus(folder);
  const RunState start = initial_state(tiny(), GetParam());
  const auto want = trained(corpus, start, 6);
  for (const int64_t stop : {1, 3, 6}) {
    Trainer first(cpu(), corpus, start);
    while (first.step() < stop) first.advance();
    save_checkpoint(first.state(), folder / "x.safetensors");
    EXPECT_TRUE(trained(corpus, load_checkpoint(folder / "x.safetensors"), 6) == want) << stop;
  }
}

TEST_P(EveryRecipe, Learns) {
  const Threads one(1);
  const Folder folder;
  const Corpus corpus = some_corpus(folder);
  RunState state = initial_state(tiny(), GetParam());
  state.settings.steps = 80;
  state.settings.learning_rate = 1e-2;
  Trainer trainer(cpu(), corpus, state);
  while (!trainer.done()) trainer.advance();
  trainer.finish();
  const History& history = trainer.state().history;
  EXPECT_GT(history.loss.front(), 5);  // log(256) = 5.5 before the first step
  EXPECT_LT(history.held_bits[0], 2.5);
  EXPECT_EQ(history.eval_step.size(), history.eval_bits.size());
  EXPECT_EQ(history.eval_step.back(), 80);
  const Settings& s = state.settings;
  EXPECT_EQ(std::accumulate(history.load.begin(), history.load.end(), int64_t{0}),
            s.steps * s.rows * s.top_k * s.blocks);
}

TEST(Trainer, SaysThatItDiverged) {
  const Folder folder;
  const Corpus corpus = some_corpus(folder);
  RunState state = initial_state(tiny(), "bf16");
  state.parameters[kEmbedding].value.assign(state.parameters[kEmbedding].value.size(),
                                            std::numeric_limits<float>::quiet_NaN());
  Trainer trainer(cpu(), corpus, state);
  const std::string what = invalid([&] { trainer.advance(); });
  EXPECT_NE(what.find("train: loss is "), what.npos) << what;
  EXPECT_NE(what.find("lower --lr"), what.npos) << what;
  EXPECT_EQ(trainer.step(), 0);
  // The state is kept back, so that nobody saves it over a good one.
  EXPECT_EQ(invalid([&] { trainer.state(); }), what);
  EXPECT_EQ(invalid([&] { trainer.advance(); }), what);
}

TEST(Trainer, DependsOnTheSeed) {
  const Folder folder;
  const Corpus corpus = some_corpus(folder);
  RunState a = initial_state(tiny(), "bf16"), b = a;
  b.settings.seed = 2;  // the same weights, other batches
  Trainer first(cpu(), corpus, a), second(cpu(), corpus, b);
  first.advance();
  second.advance();
  EXPECT_NE(first.losses(), second.losses());
}

TEST(Sample, IsAFunctionOfStateAndOptions) {
  const RunState state = initial_state(tiny(), "bf16");
  const SampleOptions options{"the ", 50, 1.0};
  const std::string sample = sample_text(cpu(), state, options);
  EXPECT_EQ(sample_text(cpu(), state, options), sample);
  EXPECT_LE(sample.size(), 50u);
  EXPECT_EQ(sample_text(cpu(), state, {"the ", 0, 1.0}), "");
  EXPECT_EQ(sample_text(cpu(), state, {"the ", 9, 0.0}),
            sample_text(cpu(), state, {"the ", 9, 1e-9}));
}

TEST(Recipes, AreSplitAtCommasThatStartOne) {
  EXPECT_EQ(split_recipes("bf16,mxfp8"), (std::vector<std::string>{"bf16", "mxfp8"}));
  EXPECT_EQ(split_recipes("nvfp4,wgrad=bf16,bf16"),
            (std::vector<std::string>{"nvfp4,wgrad=bf16", "bf16"}));
  EXPECT_EQ(split_recipes("fp8_block,wgrad=bf16,pinned,bf16"),
            (std::vector<std::string>{"fp8_block,wgrad=bf16,pinned", "bf16"}));
  EXPECT_NE(invalid([] { split_recipes("bf16,mxfp8,bf16"); }).find("recipe bf16 stands twice"),
            std::string::npos);
  EXPECT_NE(invalid([] { split_recipes("bf17"); }).find("bf17"), std::string::npos);
  EXPECT_NE(invalid([] { split_recipes(""); }), "nothing was thrown");
  EXPECT_EQ(checkpoint_path("o", "nvfp4,wgrad=bf16").string(), "o/nvfp4-wgrad-bf16.safetensors");
}
