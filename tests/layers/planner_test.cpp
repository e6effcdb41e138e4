// How the memory of a layer is shared out: places from who writes and who reads, and sizes.
#include "layers/planner.h"

#include <gtest/gtest.h>

#include <random>
#include <tuple>

#include "cadre/moe.h"
#include "cadre/sequential.h"
#include "layers/memory.h"
#include "tests/judge/errors.h"

using namespace cadre;
using layers::WgradRuns;

namespace {

ActivationPlan step(int64_t workspace_bytes) {
  ActivationPlan plan{.problem = {}, .device = this_cpu(), .name = "test", .refusals = {}};
  plan.workspace_bytes = workspace_bytes;
  return plan;
}

/// Five tensors of 512 bytes: each lives from one phase to another.
LayerPlan shared_out(WgradRuns wgrad) {
  LayerPlan plan;
  layers::Row row(plan);
  const QuantizedShape shape = layers::plain_rows(DType::kF32, 16, 8);
  const int x = row.own("x"), w = row.made("w", shape, true), a = row.made("a", shape);
  const int b = row.made("b", shape), c = row.made("c", shape), d = row.made("d", shape);
  const int unused = row.made("unused", shape);
  row.step(Phase::kForward, "one", step(100), {x}, {w, a});
  row.step(Phase::kForward, "two", step(50), {a, w}, {b});
  row.step(Phase::kBackward, "three", step(7), {b, w}, {c, d});
  row.step(Phase::kInputAgain, "four", step(60), {c}, {});
  row.step(Phase::kWgrad, "five", step(2000), {d}, {});
  row.share_memory(wgrad);
  EXPECT_EQ(plan.tensors[size_t(unused)].place, Place::kCaller);
  return plan;
}

Place place_of(const LayerPlan& plan, std::string_view name) {
  return find_tensor(plan, name)->place;
}

TEST(Planner, ATensorLiesWhereItsReadersFindIt) {
  const LayerPlan plan = shared_out(WgradRuns::kLater);
  EXPECT_EQ(place_of(plan, "x"), Place::kCaller);
  EXPECT_EQ(place_of(plan, "w"), Place::kWeightCache);
  EXPECT_EQ(place_of(plan, "a"), Place::kWorkspace);
  EXPECT_EQ(place_of(plan, "b"), Place::kSaved);
  EXPECT_EQ(place_of(plan, "c"), Place::kWorkspace);
  EXPECT_EQ(place_of(plan, "d"), Place::kPending);
  EXPECT_EQ(find_tensor(plan, "unused"), nullptr);
  EXPECT_EQ(find_tensor(plan, "b")->written, 1);
  EXPECT_EQ(find_tensor(plan, "b")->read, 2);
  EXPECT_TRUE(plan.steps[0].writes_cache);
  EXPECT_FALSE(plan.steps[1].writes_cache);
}

TEST(Planner, CountsWhatTheCallerProvides) {
  const LayerMemory later = shared_out(WgradRuns::kLater).memory;
  EXPECT_EQ(later.forward_workspace_bytes, 512 + 100);
  EXPECT_EQ(later.backward_workspace_bytes, 512 + 60);
  EXPECT_EQ(later.wgrad_workspace_bytes, 2000);
  EXPECT_EQ(later.saved_bytes, 512);
  EXPECT_EQ(later.pending_bytes, 512);
  EXPECT_EQ(later.weight_cache_bytes, 512);

  // In the run of backward, by whoever holds the layer: one workspace serves both.
  const LayerPlan held = shared_out(WgradRuns::kByHolder);
  EXPECT_EQ(place_of(held, "d"), Place::kPending);
  EXPECT_EQ(held.memory.pending_bytes, 512);
  EXPECT_EQ(held.memory.backward_workspace_bytes, 2000);
  EXPECT_EQ(held.memory.wgrad_workspace_bytes, 2000);

  // As a part of backward: what wgrad reads lies before the rest, which then makes room.
  const LayerPlan within = shared_out(WgradRuns::kWithin);
  EXPECT_EQ(place_of(within, "d"), Place::kWorkspace);
  EXPECT_EQ(find_tensor(within, "d")->offset, 0);
  EXPECT_EQ(within.memory.pending_bytes, 0);
  EXPECT_EQ(find_tensor(within, "c")->offset, 512);
  EXPECT_EQ(within.memory.backward_workspace_bytes, 512 + 2000);
  EXPECT_EQ(within.memory.wgrad_workspace_bytes, 0);
}

/// One after another, and the last two over others. Sizes in columns of 128 rows of fp32.
TEST(Planner, WhatLivesAtDifferentTimesShares) {
  LayerPlan plan;
  layers::Row row(plan);
  const auto wide = [](int64_t columns) { return layers::plain_rows(DType::kF32, 128, columns); };
  const int a = row.made("a", wide(1)), b = row.made("b", wide(2)), c = row.made("c", wide(1));
  const int d = row.made("d", wide(1));
  const int over_b = row.made_over(b, "over b", wide(2));
  const int over_c = row.made_over(c, "over c", wide(1));
  row.step(Phase::kForward, "one", step(0), {}, {a});
  row.step(Phase::kForward, "two", step(0), {a}, {b});
  row.step(Phase::kForward, "three", step(0), {b}, {c, over_b});
  row.step(Phase::kForward, "four", step(0), {over_b}, {d, over_c});
  row.step(Phase::kForward, "five", step(0), {c, d, over_c}, {});
  row.share_memory(WgradRuns::kWithin);
  const auto offset = [&](std::string_view name) { return find_tensor(plan, name)->offset; };
  EXPECT_EQ(offset("b"), 0);
  EXPECT_EQ(offset("over b"), 0);
  EXPECT_EQ(offset("a"), 1024);
  EXPECT_EQ(offset("c"), 1024);       // a has been read
  EXPECT_EQ(offset("d"), 1536);       // c has not
  EXPECT_EQ(offset("over c"), 2048);  // nor is it free for what would lie over it
  EXPECT_EQ(plan.memory.forward_workspace_bytes, 2560);
}

TEST(Planner, ALayerWithinALayerHasItsShareOfEveryMemory) {
  LayerPlan plan;
  layers::Row row(plan);
  const QuantizedShape shape = layers::plain_rows(DType::kF32, 16, 8);
  const LayerMemory inner{.forward_workspace_bytes = 10,
                          .backward_workspace_bytes = 20,
                          .wgrad_workspace_bytes = 30,
                          .saved_bytes = 40,
                          .pending_bytes = 300,
                          .weight_cache_bytes = 50};
  row.part(inner);
  const int a = row.made("a", shape);
  row.part(inner);
  row.step(Phase::kForward, "one", PartPhase{0, Phase::kForward}, {}, {a});
  row.step(Phase::kBackward, "two", PartPhase{0, Phase::kBackward}, {a}, {});
  row.share_memory(WgradRuns::kLater);
  EXPECT_EQ(plan.parts[0].saved_offset, 0);
  EXPECT_EQ(find_tensor(plan, "a")->offset, 256);
  EXPECT_EQ(plan.parts[1].saved_offset, 256 + 512);
  EXPECT_EQ(plan.parts[1].pending_offset, 512);
  EXPECT_EQ(plan.parts[1].weight_cache_offset, 256);
  EXPECT_EQ(plan.memory.forward_workspace_bytes, 10);
  EXPECT_EQ(plan.memory.backward_workspace_bytes, 20);
  EXPECT_EQ(plan.memory.wgrad_workspace_bytes, 30);
  EXPECT_EQ(plan.memory.saved_bytes, 256 + 512 + 256);
}

/// Whether two tensors of a layer lie in the same bytes of the same memory.
bool share(const LayerPlan& plan, const LayerTensor& a, const LayerTensor& b) {
  const auto memory = [&](const LayerTensor& t) {
    const Phase phase = plan.steps[size_t(t.written)].phase;
    const bool forward = t.place == Place::kWorkspace && phase == Phase::kForward;
    const bool later = t.place == Place::kWorkspace && phase == Phase::kWgrad && plan.deferred;
    return std::tuple(t.place, forward, later);
  };
  return memory(a) == memory(b) && a.offset < b.offset + b.layout.bytes &&
         b.offset < a.offset + a.layout.bytes;
}

/// Of all pairs of tensors of a layer: one has been read for the last time before the other is
/// written, or they lie apart. In place, the same step may do both.
void expect_apart(const LayerPlan& plan, std::string_view layer) {
  const std::vector<LayerTensor>& all = plan.tensors;
  for (size_t i = 0; i < all.size(); ++i)
    for (size_t j = 0; j < all.size(); ++j) {
      const LayerTensor &a = all[i], &b = all[j];
      if (i == j || !a.made || !b.made || a.written < 0 || b.written < a.written) continue;
      if (!share(plan, a, b)) continue;
      const bool in_place = b.over == int(i) && a.layout.bytes == b.layout.bytes;
      EXPECT_TRUE(a.read < b.written || (in_place && a.read == b.written))
          << a.name << " and " << b.name << " of " << layer;
    }
}

TEST(Planner, WhatLivesAtOnceLiesApartInEveryLayer) {
  std::mt19937 random(5);
  const auto draw = [&](unsigned end) { return int(random() % end); };
  for (int i = 0; i < 200; ++i) {
    MoeProblem p{.tokens = 64, .top_k = 5, .hidden = 96, .features = 64, .experts = 6};
    p.recipe = recipe_list()[size_t(draw(8))].recipe;
    p.shared_features = 32 * draw(2);
    p.parameters.discrete_dw = draw(2);
    p.options.accumulate = Accumulate(draw(4));
    for (bool* flag : {&p.bias1, &p.bias2, &p.dgrad, &p.wgrad1, &p.wgrad2, &p.keep_rows,
                       &p.options.deferred, &p.options.cache_weights, &p.options.overwrite_saved})
      *flag = draw(2);
    const bool rounds_at_random = p.recipe.wgrad.rhs.stochastic;
    p.keep_h = rounds_at_random || draw(2);
    p.options.save_input = !rounds_at_random && draw(2);
    const MoePlan made = plan(p, this_cpu());
    const std::string words = to_string(p);
    expect_apart(made, words);
    for (const GroupedMlpPlan* mlp : {&made.mlp, &made.shared}) {
      expect_apart(*mlp, to_string(mlp->problem));
      expect_apart(mlp->fc1, to_string(mlp->fc1.problem));
      expect_apart(mlp->fc2, to_string(mlp->fc2.problem));
    }
  }
}

TEST(EmptyPlans, HaveNothingToExplain) {
  const auto expect_error = [](auto plan) {
    constexpr std::string_view kSaid = "layer: the plan is empty; make it with plan()";
    EXPECT_EQ(test::invalid([&] { kept(plan); }), kSaid);
    EXPECT_EQ(test::invalid([&] { explain(plan); }), kSaid);
  };
  expect_error(GroupedLinearPlan());
  expect_error(GroupedMlpPlan());
  expect_error(MoePlan());
  expect_error(SequentialPlan());
}

}  // namespace
