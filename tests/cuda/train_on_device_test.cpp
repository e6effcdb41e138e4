// The language model of cadre train on a GPU: it learns what it learns on the CPU, resumes with
// equal bits, goes on from the CPU's checkpoints and the CPU from its own, and no step waits.
#include <cmath>

#include "apps/train/sample.h"
#include "apps/train/trainer.h"
#include "cadre/recipe.h"
#include "tests/apps/train/folder.h"
#include "tests/cuda/mirror.h"

namespace cadre::train {
namespace {

using test::first_gpu;
using test::Folder;

/// Widths that the Hopper kernels take, and little to do.
Settings tiny() {
  Settings s;
  s.window = 2;
  s.hidden = 16;
  s.features = 32;
  s.experts = 3;
  s.blocks = 2;
  s.rows = 24;
  s.steps = 4;
  s.eval_every = 3;
  s.held_out = 0.02;
  s.learning_rate = 1e-2;
  return s;
}
constexpr int64_t kSteps = 4;

std::vector<uint8_t> bytes_of(const RunState& state) {
  const SafeTensors file = to_safetensors(state);
  std::string header;
  std::vector<uint8_t> bytes;
  for (const auto& part : safetensors_parts(file, header))
    bytes.insert(bytes.end(), part.begin(), part.end());
  return bytes;
}

struct TrainOnDevice : test::OnDevice {
  void SetUp() override {
    test::OnDevice::SetUp();
    if (IsSkipped()) return;
    gpu = open_engine(first_gpu());
    corpus = read_corpus({folder().write("text", test::prose(2100))}, tiny().held_out);
  }

  const Folder& folder() {
    if (!folder_) folder_.emplace();
    return *folder_;
  }
  RunState start(const std::string& recipe = "bf16") const { return initial_state(tiny(), recipe); }
  /// The state at a step, read back from a file; at the last one with its score.
  RunState trained(Engine& engine, RunState state, int64_t until) {
    Trainer trainer(engine, corpus, std::move(state));
    while (trainer.step() < until) trainer.advance();
    if (trainer.done()) trainer.finish();
    save_checkpoint(trainer.state(), folder() / "x.safetensors");
    return load_checkpoint(folder() / "x.safetensors");
  }

  std::unique_ptr<Engine> gpu, cpu = open_engine(this_cpu());
  Corpus corpus;

 private:
  std::optional<Folder> folder_;
};

/// The runs learn the same, up to roundings to bf16 and what a step makes of them.
void expect_alike(const History& got, const History& want) {
  ASSERT_EQ(got.loss.size(), want.loss.size());
  EXPECT_NEAR(got.loss[0], want.loss[0], 1e-3);
  for (size_t i = 0; i < want.loss.size(); ++i)
    EXPECT_NEAR(got.loss[i], want.loss[i], 0.02) << "step " << i + 1;
  EXPECT_EQ(got.eval_step, want.eval_step);
  ASSERT_EQ(got.eval_bits.size(), want.eval_bits.size());
  for (size_t i = 0; i < want.eval_bits.size(); ++i)
    EXPECT_NEAR(got.eval_bits[i], want.eval_bits[i], 0.02) << i;
  EXPECT_EQ(got.held_bits.size(), 1u);
  int64_t rows = 0, moved = 0;
  for (size_t i = 0; i < want.load.size(); ++i) {
    rows += got.load[i];
    moved += std::abs(got.load[i] - want.load[i]);
  }
  EXPECT_EQ(rows, tiny().steps * tiny().rows * tiny().top_k * tiny().blocks);
  EXPECT_LE(moved, rows / 20) << "the experts have other rows";
}

struct EveryRecipe : TrainOnDevice, testing::WithParamInterface<const char*> {};
/// On the emulator those whose steps differ: plain, of codes, and of all that a format can have.
constexpr const char* kRecipes[] = {
    "f32",   "bf16",       "f16",       "mxfp8", "nvfp4",
#ifndef CADRE_EMULATED
    "mxfp4", "fp8_tensor", "fp8_block",
#endif
};
INSTANTIATE_TEST_SUITE_P(Train, EveryRecipe, testing::ValuesIn(kRecipes),
                         [](const auto& each) { return std::string(each.param); });

TEST_P(EveryRecipe, LearnsWhatTheCpuLearns) {
  const RunState want = trained(*cpu, start(GetParam()), kSteps);
  const RunState got = trained(*gpu, start(GetParam()), kSteps);
  expect_alike(got.history, want.history);
  EXPECT_LT(got.history.loss.back(), got.history.loss.front());
}

TEST_F(TrainOnDevice, GoesOnFromACheckpointWithEqualBits) {
  const auto want = bytes_of(trained(*gpu, start(), kSteps));
  const RunState part = trained(*gpu, start(), 1);
  EXPECT_EQ(part.step, 1);
  EXPECT_TRUE(bytes_of(trained(*gpu, part, kSteps)) == want);
}

TEST_F(TrainOnDevice, SharesCheckpointsWithTheCpu) {
  const RunState want = trained(*cpu, start(), kSteps);
  expect_alike(trained(*gpu, trained(*cpu, start(), 2), kSteps).history, want.history);
  expect_alike(trained(*cpu, trained(*gpu, start(), 2), kSteps).history, want.history);
}

TEST_F(TrainOnDevice, SamplesText) {
  const RunState state = trained(*cpu, start(), 1);
  const SampleOptions options{"the ", 6, 0.7};
  const std::string sample = sample_text(*gpu, state, options);
  EXPECT_FALSE(sample.empty());
  EXPECT_EQ(sample_text(*gpu, state, options), sample);
}

TEST_F(TrainOnDevice, WaitsInNoStep) {
  RunState state = start();
  state.settings.eval_every = 100;
  const auto want = bytes_of(trained(*gpu, state, 2));
  Trainer trainer(*gpu, corpus, state);
  trainer.advance();
  // Whoever waits for a stream that is captured gets an error.
  const auto stream = static_cast<cudaStream_t>(gpu->stream().handle);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t step = nullptr;
  cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "capture");
  trainer.advance();
  cuda::check(cudaStreamEndCapture(stream, &graph), "end the capture");
  cuda::check(cudaGraphInstantiate(&step, graph, 0), "instantiate");
  cuda::check(cudaGraphLaunch(step, stream), "launch");
  EXPECT_TRUE(bytes_of(trainer.state()) == want);
  cudaGraphExecDestroy(step);
  cudaGraphDestroy(graph);
}

TEST_F(TrainOnDevice, KeepsAStateBackThatDiverged) {
  RunState state = start();
  std::vector<float>& table = state.parameters[kEmbedding].value;
  table.assign(table.size(), NAN);
  Trainer trainer(*gpu, corpus, state);
  trainer.advance();
  trainer.advance();
  for (int i = 0; i < 2; ++i) {
    try {
      trainer.state();
      FAIL() << "a state without numbers was handed out";
    } catch (const InvalidArgument& error) {
      const std::string what = error.what();
      EXPECT_NE(what.find(" at step 1, must be a number"), what.npos) << what;
    }
  }
}

}  // namespace
}  // namespace cadre::train
