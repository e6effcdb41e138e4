// How the memory of a layer is shared out: places from who writes and who reads, and sizes.
#include "layers/planner.h"

#include <gtest/gtest.h>

#include "cadre/grouped_mlp.h"
#include "layers/memory.h"

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

  // After backward its own tensors make room; what wgrad reads stays before them.
  const LayerPlan after = shared_out(WgradRuns::kAfter);
  EXPECT_EQ(place_of(after, "d"), Place::kPending);
  EXPECT_EQ(after.memory.pending_bytes, 0);
  EXPECT_EQ(after.memory.backward_workspace_bytes, 512 + 2000);
  EXPECT_EQ(after.memory.wgrad_workspace_bytes, 0);

  // Within backward nothing makes room.
  const LayerPlan within = shared_out(WgradRuns::kWithin);
  EXPECT_EQ(place_of(within, "d"), Place::kWorkspace);
  EXPECT_EQ(find_tensor(within, "d")->offset, 512);
  EXPECT_EQ(within.memory.backward_workspace_bytes, 512 + 512 + 2000);
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

}  // namespace
