// Training steps on a machine: within the bounds of the formulas, the same twice, and the same
// while another runs.
#include <gtest/gtest.h>

#include <map>

#include "tests/judge/on_machine.h"
#include "tests/layers/layer_copy.h"
#include "tests/layers/linear_model.h"
#include "tests/layers/mlp_check.h"
#include "tests/layers/random_layers.h"
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

constexpr int64_t kStep = 8;  // elements between rows, so that TMA takes them

struct Step : test::OnMachine {
  MadeFor here() const { return {machine->device(), kStep}; }

  /// A step of a case on the machine, and everything back on the host.
  template <class Case>
  void run(Case& c, bool by_queue = true) {
    LayerCopy copy(*machine, c);
    machine->run([&](Stream stream) { copy.step(stream, by_queue); });
    copy.memory.fetch();
    EXPECT_EQ(copy.memory.damage(), "");
  }
};

/// Few rows and weights in total, since the model multiplies them one by one.
template <class Work>
void for_counts(int draws, unsigned seed, Work&& work) {
  test::for_random_counts(draws, seed, [&](const Counts& counts) {
    if (counts.rows <= 200 && counts.experts() <= 64) work(counts);
  });
}

TEST_F(Step, OfALinearIsItsFormulasWithinTheBound) {
  constexpr int64_t kWidths[] = {8, 24, 40, 72, 13};
  unsigned seed = 0;
  for_counts(std::max(machine->draws(1600), 24), 1, [&](const Counts& counts) {
    GroupedLinearProblem p = test::random_linear(counts, ++seed, kWidths);
    p.recipe = recipe_list()[seed % 3].recipe;
    if (seed % 5 != 0) p.dtype = p.parameters.weight = p.recipe.fprop.rhs.element;
    if (seed % 5 > 1) p.parameters.dw = seed % 2 ? DType::kF32 : p.dtype;
    const bool own_w = p.recipe.fprop.rhs.element == p.parameters.weight;
    if (own_w && seed % 7 == 0) p.parameters.weight_major = Major::kColumn;
    const LinearCase before(p, counts, seed, here());
    LinearCase after(p, counts, seed, here());
    run(after, seed % 2);
    test::LinearModel(before, after).check();
  });
}

TEST_F(Step, OfAnExpertMlpIsTheModelWithinTheBound) {
  unsigned seed = 0;
  std::map<std::string_view, int> taken;
  const int draws = machine->draws(1600);
  for_counts(std::max(draws, 200), 2, [&](const Counts& counts) {
    if (counts.rows > 60) return;
    GroupedMlpProblem p = test::plain_mlp(counts, ++seed);
    if (int(seed) > draws && taken.contains(info(p.activation).name)) return;
    p.hidden = seed % 2 ? 8 : 24;
    if (p.features != 32) p.features = seed % 3 ? 8 : 40;
    p.parameters.discrete_weight = seed / 3 % 2;
    p.parameters.discrete_dw = seed / 5 % 2;
    p.parameters.discrete_bias = seed / 7 % 2;
    ++taken[info(p.activation).name];
    const MlpCase before(p, counts, seed, here());
    MlpCase after(p, counts, seed, here());
    after.shows_inside = true;
    run(after, seed / 2 % 2);
    test::MlpCheck(before, after).check();
  });
  EXPECT_EQ(taken.size(), activation_list().size());
}

TEST_F(Step, HowAnExpertMlpRunsChangesNoBit) {
  const Counts counts{.rows = 75, .of = {17, 0, 33, 20}};
  GroupedMlpProblem p{.rows = 75, .hidden = 24, .features = 40, .experts = 4};
  p.prob = p.bias1 = p.bias2 = p.bias2_scale = true;
  p.parameters.dw = DType::kF32;
  p.options.accumulate = Accumulate::kPerExpert;
  MlpCase want(p, counts, 3, here());
  run(want);
  const auto all = unsigned(machine->draws(31));
  for (unsigned mask = 1; mask < 32; mask += 31 / all) {
    GroupedMlpProblem other = p;
    other.options.deferred = mask & 1;
    other.keep_h = mask & 2;
    other.parameters.discrete_weight = mask & 4;
    other.parameters.discrete_dw = mask & 8;
    other.parameters.discrete_bias = mask & 16;
    MlpCase got(other, counts, 3, here());
    run(got, mask & 2);
    EXPECT_EQ(first_difference(test::MlpResult(got), test::MlpResult(want)), "")
        << to_string(other);
  }
}

/// 16-bit rows of operations, as wide as a GPU wants them.
SequentialProblem row(std::string_view recipe) {
  SequentialProblem p{.ops = {test::linear(16, 8, recipe), test::linear(64, 16, recipe),
                              test::swiglu(32), test::linear(16, 32, recipe)}};
  ActivationProblem last{.kind = ActivationKind::kReluSquared, .rows = 45, .features = 16};
  last.experts = 3;
  p.ops.emplace_back(last);
  return test::each_linear(p, [](GroupedLinearProblem& l) { l.options.deferred = l.bias = true; });
}

TEST_F(Step, OfARowIsThatOfItsOpsBitForBit) {
  RowCase fused(row("bf16"), test::kRowCounts, 4, here());
  RowCase single(test::unfused(row("bf16")), test::kRowCounts, 4, here());
  EXPECT_NE(fused.plan.name, single.plan.name);
  run(fused);
  run(single, false);
  EXPECT_EQ(byte_difference(fused, single), "");
  EXPECT_EQ(fused.damage() + single.damage(), "");
  for (double v : used_rows(fused.y, test::kRowCounts)) EXPECT_FALSE(std::isnan(v));
}

TEST_F(Step, TwiceHasTheSameBits) {
  std::mt19937 random(5);
  const Counts counts = test::random_counts(random, test::CountsKind::kSkewed, 8, 40);
  GroupedLinearProblem p{.rows = counts.rows, .n = 264, .k = 136, .experts = 8};
  p.bias = p.bias_scale = true;
  p.parameters.dw = DType::kF32;
  p.options.accumulate = Accumulate::kDevice;
  LinearCase once(p, counts, 6, here()), again(p, counts, 6, here());
  run(once);
  run(again);
  EXPECT_EQ(byte_difference(again, once), "");
}

TEST_F(Step, AtOnceHasTheBitsOfOneAfterTheOther) {
  const Counts many{.rows = 160, .of = {33, 0, 90, 20}}, few{.rows = 60, .of = {0, 51, 3}};
  GroupedLinearProblem one{.rows = 160, .n = 136, .k = 72, .experts = 4};
  one.recipe = parse_recipe("f16");
  one.dtype = one.parameters.weight = one.parameters.dw = DType::kF16;
  one.parameters.discrete_weight = one.parameters.discrete_dw = one.options.deferred = true;
  GroupedMlpProblem two{.rows = 60, .hidden = 40, .features = 72, .experts = 3};
  two.prob = two.bias1 = true;
  two.parameters.dw = DType::kF32;
  two.options.accumulate = Accumulate::kYes;
  LinearCase want_one(one, many, 7, here());
  MlpCase want_two(two, few, 8, here());
  run(want_one);
  run(want_two);
  for (int round = 0; round < machine->draws(24); ++round) {
    LinearCase got_one(one, many, 7, here());
    MlpCase got_two(two, few, 8, here());
    LayerCopy copy_one(*machine, got_one);
    LayerCopy copy_two(*machine, got_two);
    const test::Work works[] = {[&](Stream stream) { copy_one.step(stream); },
                                [&](Stream stream) { copy_two.step(stream); }};
    machine->run_at_once(works);
    copy_one.memory.fetch();
    copy_two.memory.fetch();
    EXPECT_EQ(byte_difference(got_one, want_one), "");
    EXPECT_EQ(byte_difference(got_two, want_two), "");
  }
}

}  // namespace
