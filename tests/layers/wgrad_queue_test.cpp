#include "cadre/wgrad_queue.h"

#include <gtest/gtest.h>

#include "tests/judge/errors.h"
#include "tests/layers/linear_case.h"

using namespace cadre;
using test::Counts;
using test::first_difference;
using test::invalid;
using test::LinearCase;
using test::LinearResult;

namespace {

const Counts kCounts{.rows = 20, .of = {7, 0, 11}};

GroupedLinearProblem problem(std::string_view recipe, bool discrete = false) {
  GroupedLinearProblem p{.rows = 20, .n = 18, .k = 33, .experts = 3};
  p.recipe = parse_recipe(recipe);
  p.bias = true;
  p.options.deferred = true;
  p.parameters.discrete_weight = p.parameters.discrete_dw = discrete;
  p.parameters.dw = DType::kF32;
  return p;
}

void run_next(WgradQueue& queue, int64_t version = 0) {
  const test::OwnedWorkspace w(queue.front().plan->memory.wgrad_workspace_bytes);
  queue.run_next(version, w.get(), {});
}

TEST(WgradQueue, RunsInOrderAndEqualsImmediate) {
  WgradQueue queue(3);
  std::vector<std::unique_ptr<LinearCase>> deferred;
  std::vector<LinearResult> want;
  unsigned seed = 0;
  for (const char* recipe : {"bf16", "mxfp8", "nvfp4"}) {
    GroupedLinearProblem p = problem(recipe, seed % 2);
    p.options.accumulate = Accumulate(++seed % 2);
    deferred.push_back(std::make_unique<LinearCase>(p, kCounts, seed));
    p.options.deferred = false;
    LinearCase immediate(p, kCounts, seed);
    immediate.step();
    want.emplace_back(immediate);
  }
  std::vector<std::vector<double>> dw_before;
  for (auto& c : deferred) {
    dw_before.push_back(c->parameters.dw.values());
    c->queue = &queue;
    c->forward();
    c->backward();
  }
  ASSERT_EQ(queue.pending(), 3);
  for (size_t i = 0; i < deferred.size(); ++i) {
    // Bias gradients are there at once; dw is untouched until its turn.
    EXPECT_EQ(first_difference(LinearResult(*deferred[i]).dbias, want[i].dbias), "");
    EXPECT_EQ(first_difference(LinearResult(*deferred[i]).dw, dw_before[i]), "");
    run_next(queue);
    EXPECT_EQ(first_difference(LinearResult(*deferred[i]), want[i]), "");
  }
  EXPECT_EQ(queue.pending(), 0);
}

TEST(WgradQueue, TheRingGoesRound) {
  WgradQueue queue(2);
  LinearCase a(problem("bf16"), kCounts, 1), b(problem("bf16"), kCounts, 2);
  for (int round = 0; round < 5; ++round) {
    queue.push(a.plan, a.args());
    queue.push(b.plan, b.args());
    EXPECT_EQ(queue.front().plan, &a.plan);
    run_next(queue);
    EXPECT_EQ(queue.front().plan, &b.plan);
    run_next(queue);
    queue.push(b.plan, b.args());
    run_next(queue);
  }
  queue.push(a.plan, a.args());
  queue.clear();
  EXPECT_EQ(queue.pending(), 0);
}

TEST(WgradQueue, AGradientMayMoveBeforeItsTurn) {
  WgradQueue queue(1);
  LinearCase c(problem("mxfp8"), kCounts, 3);
  c.queue = &queue;
  c.forward();
  c.backward();
  test::ExpertTensor moved({DType::kF32, 3, 18, 33});
  queue.front().args.parameters.dw = moved.view();
  run_next(queue);
  EXPECT_TRUE(c.parameters.dw.untouched());
  c.wgrad();
  EXPECT_EQ(first_difference(moved.values(), c.parameters.dw.values()), "");
}

TEST(WgradQueue, RefusesGradientsOfParametersThatChanged) {
  WgradQueue queue(1);
  LinearCase c(problem("bf16"), kCounts, 4);
  c.queue = &queue;
  c.version = 3;
  c.forward();
  c.backward();
  EXPECT_EQ(invalid([&] { run_next(queue, 4); }),
            "wgrad_queue: version of the parameters is 4, must be 3 as in backward; they changed "
            "while their gradient was pending");
  EXPECT_TRUE(c.parameters.dw.untouched());
  EXPECT_EQ(queue.pending(), 1);
  run_next(queue, 3);
  EXPECT_FALSE(c.parameters.dw.untouched());
}

TEST(WgradQueue, SaysWhenItIsFullEmptyOrMisused) {
  EXPECT_EQ(invalid([] { WgradQueue none(0); }), "wgrad_queue: capacity is 0, must be 1 or more");
  WgradQueue queue(1);
  EXPECT_EQ(invalid([&] { queue.front(); }),
            "wgrad_queue: no task is pending, must be 1 or more; backward pushes them");
  EXPECT_EQ(invalid([&] { queue.run_next(0, {}, {}); }),
            "wgrad_queue: no task is pending, must be 1 or more; backward pushes them");

  LinearCase c(problem("bf16"), kCounts, 5);
  c.queue = &queue;
  c.forward();
  c.backward();
  c.clear();
  EXPECT_EQ(invalid([&] { c.backward(); }).substr(0, 110),
            "grouped_linear: queue has 1 of 1 tasks, must have room for 1; run the pending weight "
            "gradients first [grouped_");
  EXPECT_TRUE(c.dx.untouched(0, 20));
  EXPECT_EQ(invalid([&] { queue.push(c.plan, c.args()); }),
            "wgrad_queue: 1 tasks are pending, must be fewer than 1, the capacity; run one first");
  WgradQueue moved = std::move(queue);
  EXPECT_EQ(moved.pending(), 1);
  EXPECT_EQ(queue.pending(), 0);
  EXPECT_EQ(invalid([&] { queue.front(); }),
            "wgrad_queue: no task is pending, must be 1 or more; backward pushes them");
  EXPECT_EQ(invalid([&] { queue.push(c.plan, c.args()); }),
            "wgrad_queue: 0 tasks are pending, must be fewer than 0, the capacity; run one first");

  GroupedLinearProblem immediate = problem("bf16");
  immediate.options.deferred = false;
  LinearCase other(immediate, kCounts, 6);
  EXPECT_EQ(invalid([&] { queue.push(other.plan, other.args()); }).substr(0, 117),
            "wgrad_queue: the plan defers no weight gradient, must be planned with deferred=yes "
            "and wgrad=yes [grouped_linear R=20");
}

}  // namespace
