// A recorded training step, replayed with other counts, data, pointers and main gradients, has the
// bits of the step that is launched anew. Recording shows that it launches kernels and nothing
// else: see Machine::record().
#include <gtest/gtest.h>

#include "tests/judge/on_machine.h"
#include "tests/layers/layer_copy.h"
#include "tests/layers/mlp_case.h"
#include "tests/layers/row_case.h"

using namespace cadre;
using test::byte_difference;
using test::Counts;
using test::LayerCopy;
using test::LinearCase;
using test::MadeFor;
using test::MlpCase;
using test::RowCase;

namespace {

constexpr int64_t kRows = 96, kStep = 8;
constexpr int kExperts = 5;

/// Counts from replay to replay: usual, all rows to one expert, none, one each, and random ones.
std::vector<Counts> other_counts(int draws) {
  std::vector<Counts> all = {{kRows, {17, 0, 33, 1, 20}}, {kRows, {0, 0, kRows, 0, 0}},
                             {kRows, {0, 0, 0, 0, 0}},    {kRows, {kRows, 0, 0, 0, 0}},
                             {kRows, {1, 1, 1, 1, 1}},    {kRows, {0, 0, 0, 0, kRows}}};
  all.resize(std::min(all.size(), size_t(draws)));
  std::mt19937 random(1);
  for (int i = 4; i < draws; ++i) {
    Counts counts{kRows, std::vector<int64_t>(kExperts)};
    int64_t left = kRows;
    for (int64_t& count : counts.of) left -= count = int64_t(random() % size_t(left + 1));
    std::shuffle(counts.of.begin(), counts.of.end(), random);
    all.push_back(counts);
  }
  return all;
}

struct Replay : test::OnMachine {
  MadeFor here() const { return {machine->device(), kStep}; }

  template <class Case, class Problem>
  void expect_eager_bits(const Problem& p, bool by_queue, int draws = 12) {
    const std::vector<Counts> all = other_counts(machine->draws(draws));
    unsigned seed = 10;
    Case first(p, all[0], seed, here());
    LayerCopy live(*machine, first);
    machine->run([&](Stream stream) { live.step(stream, by_queue); });
    const auto graph = machine->record([&](Stream stream) { live.step(stream, by_queue); });
    std::unique_ptr<Case> last;
    for (const Counts& counts : all) {
      auto want = std::make_unique<Case>(p, counts, ++seed, here());
      Case got(p, counts, seed, here());
      LayerCopy eager(*machine, *want), own(*machine, got);
      machine->run([&](Stream stream) { eager.step(stream, by_queue); });
      eager.memory.fetch();

      live.memory.upload_from(own.memory);
      graph->replay();
      own.memory.fetch_from(live.memory);
      EXPECT_EQ(byte_difference(got, *want), "") << to_string(p) << " seed " << seed;
      EXPECT_EQ(got.damage() + own.memory.damage(), "") << to_string(p);
      EXPECT_TRUE(!last || !byte_difference(got, *last).empty()) << "nothing changed";
      last = std::move(want);
    }
  }
};

/// How the parameters of a step are laid out.
ParameterLayout layout(bool discrete, DType dtype) {
  ParameterLayout l{.weight = dtype, .bias = dtype, .dw = DType::kF32, .dbias = DType::kF32};
  l.discrete_weight = l.discrete_bias = l.discrete_dw = discrete;
  return l;
}

TEST_F(Replay, OfALinear) {
  for (Accumulate accumulate : {Accumulate::kDevice, Accumulate::kPerExpert, Accumulate::kNo}) {
    const bool discrete = accumulate != Accumulate::kDevice;
    GroupedLinearProblem p{.rows = kRows, .n = 72, .k = 40, .experts = kExperts};
    p.recipe = parse_recipe(discrete ? "f16" : "bf16");
    p.dtype = p.recipe.fprop.lhs.element;
    p.parameters = layout(discrete, p.dtype);
    if (accumulate == Accumulate::kNo) p.parameters.dw = p.dtype;
    p.bias = p.bias_scale = true;
    p.options.accumulate = p.options.accumulate_bias = accumulate;
    p.options.deferred = accumulate != Accumulate::kNo;
    expect_eager_bits<LinearCase>(p, true);
  }
}

// So much work for two SMs that the kernels of Hopper count the tiles that are taken.
TEST_F(Replay, OfALinearWhoseTilesAreCounted) {
  GroupedLinearProblem p{
      .rows = kRows, .n = 264, .k = 520, .experts = kExperts, .options = {.unit_budget = 2}};
  p.recipe = parse_recipe("bf16");
  p.dtype = DType::kBf16;
  p.parameters = layout(false, p.dtype);
  p.parameters.dw = p.dtype;
  expect_eager_bits<LinearCase>(p, false, 3);
}

TEST_F(Replay, OfAnExpertMlp) {
  for (bool discrete : {false, true}) {
    GroupedMlpProblem p{.rows = kRows, .hidden = 40, .features = 24, .experts = kExperts};
    p.parameters = layout(discrete, DType::kBf16);
    p.prob = p.bias1 = p.bias2 = p.bias2_scale = p.options.deferred = true;
    p.options.accumulate = discrete ? Accumulate::kDevice : Accumulate::kPerExpert;
    p.options.accumulate_bias = Accumulate::kDevice;
    p.keep_h = discrete;
    p.options.tail = discrete ? Tail::kZero : Tail::kKeep;
    expect_eager_bits<MlpCase>(p, discrete);
  }
}

TEST_F(Replay, OfARow) {
  SequentialProblem p{.ops = {test::linear(64, 8, "bf16"), test::swiglu(32),
                              test::linear(16, 32, "bf16"), test::linear(8, 16, "bf16")}};
  for (RowOp& op : p.ops)
    std::visit([](auto& own) { own.rows = kRows, own.experts = kExperts; }, op);
  p = test::each_linear(p, [](GroupedLinearProblem& l) {
    l.options.deferred = l.bias = true;
    l.parameters.discrete_weight = l.parameters.discrete_dw = true;
    l.options.accumulate = Accumulate::kDevice;
  });
  expect_eager_bits<RowCase>(p, true);
}

}  // namespace
