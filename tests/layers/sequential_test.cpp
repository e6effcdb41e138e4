// Rows of operations: fused equals unfused bit for bit, and buffers by index.
#include "cadre/sequential.h"

#include <gtest/gtest.h>

#include "tests/judge/errors.h"
#include "tests/layers/row_case.h"

using namespace cadre;
using test::Counts;
using test::difference;
using test::each_linear;
using test::first_difference;
using test::kRowCounts;
using test::long_row;
using test::mlp_row;
using test::OwnedWorkspace;
using test::RowCase;
using test::Tensor;
using test::unfused;

namespace {

TEST(Sequential, PlansTheExpertMlpAndNamesIt) {
  const SequentialPlan fused = plan(long_row("mxfp8"), this_cpu());
  EXPECT_EQ(fused.name, "grouped_linear + grouped_mlp + activation");
  EXPECT_TRUE(fused.refusals.empty());
  EXPECT_EQ(fused.linears, 3);
  EXPECT_EQ(fused.extra_inputs, 2);
  const SequentialPlan row = plan(unfused(long_row("mxfp8")), this_cpu());
  EXPECT_EQ(row.name, "grouped_linear + grouped_linear + activation + grouped_linear + activation");
  ASSERT_EQ(row.refusals.size(), 1u);
  EXPECT_EQ(row.refusals[0].why, "ops 1 to 3: the problem says fuse=no");
  const std::string words = explain(row);
  for (const char* part : {"not grouped_mlp: ops 1 to 3", "op 0: grouped_linear",
                           "op 2:", "together", "kept for backward"})
    EXPECT_NE(words.find(part), std::string::npos) << part << " in\n" << words;
  EXPECT_NE(explain(fused).find("op 1 to 3: grouped_mlp R=45"), std::string::npos);
}

TEST(Sequential, FusedEqualsUnfusedBitForBit) {
  unsigned seed = 0;
  for (const char* recipe :
       {"bf16", "f32", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4", "mxfp4", "nvfp4,wgrad=bf16"})
    for (const auto& make : {mlp_row, long_row})
      for (bool deferred : {false, true}) {
        const SequentialProblem p = each_linear(make(recipe), [&](GroupedLinearProblem& l) {
          l.options.deferred = deferred;
          l.options.cache_weights = seed % 2;
          l.options.save_input = seed % 3 == 0;
        });
        RowCase fused(p, kRowCounts, ++seed), row(unfused(p), kRowCounts, seed);
        EXPECT_NE(fused.plan.name, row.plan.name);
        fused.step(deferred);
        row.step(deferred);
        EXPECT_EQ(difference(fused, row), "") << to_string(p);
        EXPECT_EQ(fused.damage() + row.damage(), "") << to_string(p);
      }
}

TEST(Sequential, IsTheExpertMlpBitForBit) {
  for (const char* recipe : {"bf16", "nvfp4"}) {
    RowCase row(unfused(mlp_row(recipe)), kRowCounts, 4);
    row.step();
    GroupedMlpProblem p{.rows = 45, .hidden = 10, .features = 32, .experts = 3};
    p.recipe = parse_recipe(recipe);
    p.prob = p.bias1 = p.bias2 = p.bias2_scale = true;
    test::MlpCase mlp(p, kRowCounts, 5);
    mlp.rng = row.rng;
    std::swap(mlp.x, row.x);
    std::swap(mlp.dy, row.dy);
    std::swap(mlp.prob, row.extra[0]);
    std::swap(mlp.bias2_scale, row.extra[1]);
    std::swap(mlp.fc1.w, row.own[0].w);
    std::swap(mlp.fc1.bias, row.own[0].bias);
    std::swap(mlp.fc2.w, row.own[1].w);
    std::swap(mlp.fc2.bias, row.own[1].bias);
    mlp.step();
    EXPECT_EQ(first_difference(used_rows(mlp.y, kRowCounts), row.result()[0]), "");
    EXPECT_EQ(first_difference(used_rows(mlp.dx, kRowCounts), row.result()[1]), "");
    EXPECT_EQ(first_difference(mlp.fc1.dw.values(), row.own[0].dw.values()), "");
    EXPECT_EQ(first_difference(mlp.fc2.dw.values(), row.own[1].dw.values()), "");
  }
}

TEST(Sequential, BuffersByIndexChangeNoBitAndHoldTheTensors) {
  for (bool fuse : {true, false})
    for (bool deferred : {false, true}) {
      SequentialProblem p = each_linear(
          mlp_row("bf16"), [&](GroupedLinearProblem& l) { l.options.deferred = deferred; });
      p.fuse = fuse;
      RowCase want(p, kRowCounts, 6), got(p, kRowCounts, 6);
      want.step(deferred);
      Tensor z(DType::kBf16, {45, 64}), dh(DType::kBf16, {45, 32}, {.row_gap = 3});
      got.op_arguments = {{.op = 0, .key = "output", .value = z.view()},
                          {.op = -1, .key = "grad_input", .value = dh.view()},
                          {.op = -1, .key = "output", .value = got.y.view()},
                          {.op = -3, .key = "grad_input", .value = got.dx.view()}};
      got.gives_y = got.gives_dx = false;
      got.step(deferred);
      EXPECT_EQ(difference(got, want), "");
      // The buffers hold the tensors between the ops, and their tails are as they were.
      for (const Tensor* t : {&z, &dh}) {
        for (double v : used_rows(*t, kRowCounts)) EXPECT_FALSE(std::isnan(v));
        EXPECT_TRUE(t->untouched(37, 45));
        EXPECT_EQ(t->damage(), "");
      }
    }
}

TEST(Sequential, DeferredGradientsGoThroughTheQueueInBackwardOrder) {
  const SequentialProblem p =
      each_linear(long_row("mxfp8"), [](GroupedLinearProblem& l) { l.options.deferred = true; });
  for (bool fuse : {true, false}) {
    SequentialProblem own = p;
    own.fuse = fuse;
    RowCase want(own, kRowCounts, 7), got(own, kRowCounts, 7);
    want.step(true);
    WgradQueue queue(3);
    got.queue = &queue;
    got.run_forward();
    got.run_backward();
    ASSERT_EQ(queue.pending(), 3);
    const OwnedWorkspace w(got.plan.memory.wgrad_workspace_bytes);
    for (size_t i = 3; i-- > 0;) {
      EXPECT_TRUE(got.own[i].dw.untouched());
      queue.run_next(0, w.get(), {});
      EXPECT_FALSE(got.own[i].dw.untouched());
    }
    EXPECT_EQ(difference(got, want), "");
  }
}

TEST(Sequential, AFrozenStartIsNotVisitedByBackward) {
  SequentialProblem p = long_row("mxfp8");
  auto& first = std::get<GroupedLinearProblem>(p.ops[0]);
  first.wgrad = false;
  auto& second = std::get<GroupedLinearProblem>(p.ops[1]);
  second.dgrad = false;
  RowCase all(long_row("mxfp8"), kRowCounts, 8), some(p, kRowCounts, 8);
  EXPECT_EQ(some.plan.backward_stop, 1);
  all.step();
  some.gives_dx = false;
  some.step();
  EXPECT_TRUE(some.own[0].dw.untouched());
  EXPECT_TRUE(some.dx.untouched(0, 45));
  for (size_t i : {1, 2})
    EXPECT_EQ(first_difference(some.own[i].dw.values(), all.own[i].dw.values()), "");
  EXPECT_EQ(first_difference(some.result()[2], all.result()[2]), "");
}

TEST(Sequential, KeepsWhatItsStepsKeep) {
  const SequentialPlan fused = plan(mlp_row("bf16"), this_cpu());
  // x, z, prob and bias2_scale.
  EXPECT_DOUBLE_EQ(bytes_per_token(kept(fused), 45),
                   2 * 10 + double(fused.memory.saved_bytes) / 45 + 8);
  const SequentialPlan row = plan(unfused(mlp_row("bf16")), this_cpu());
  EXPECT_GT(bytes_per_token(kept(row), 45), bytes_per_token(kept(fused), 45));
}

TEST(Sequential, RefusesToFuseWhatDoesNotFit) {
  const auto why = [](auto change) {
    SequentialProblem p = mlp_row("mxfp8");
    change(std::get<GroupedLinearProblem>(p.ops[0]), std::get<ActivationProblem>(p.ops[1]),
           std::get<GroupedLinearProblem>(p.ops[2]));
    const SequentialPlan made = plan(p, this_cpu());
    EXPECT_EQ(made.name, "grouped_linear + activation + grouped_linear");
    return made.refusals.empty() ? std::string() : made.refusals[0].why;
  };
  using L = GroupedLinearProblem;
  using A = ActivationProblem;
  EXPECT_EQ(why([](L&, A&, L& two) { two.n = 11; }),
            "ops 0 to 2: the second linear's outputs are not as many as the first one's inputs");
  EXPECT_EQ(why([](L& one, A&, L&) { one.recipe = parse_recipe("bf16"); }),
            "ops 0 to 2: the recipes differ");
  EXPECT_EQ(why([](L&, A& act, L& two) { act.h = two.dtype = DType::kF32; }),
            "ops 0 to 2: the dtypes differ");
  EXPECT_EQ(why([](L& one, A&, L&) { one.parameters.dw = DType::kF32; }),
            "ops 0 to 2: the parameters' types or layouts differ");
  EXPECT_EQ(why([](L& one, A&, L&) { one.options.accumulate = Accumulate::kYes; }),
            "ops 0 to 2: the linears accumulate differently");
  EXPECT_EQ(why([](L& one, A&, L&) { one.options.deferred = true; }),
            "ops 0 to 2: only one linear is deferred");
  EXPECT_EQ(why([](L& one, A&, L&) { one.options.cache_weights = true; }),
            "ops 0 to 2: only one linear caches its weights");
  EXPECT_EQ(why([](L& one, A&, L&) { one.options.overwrite_saved = true; }),
            "ops 0 to 2: only one linear may overwrite what it saved");
  EXPECT_EQ(why([](L&, A& act, L&) { act.tail = Tail::kZero; }), "ops 0 to 2: the tails differ");
  EXPECT_EQ(why([](L& one, A&, L&) { one.options.amax_eps = 1; }), "ops 0 to 2: amax_eps differs");
  EXPECT_EQ(why([](L& one, A&, L&) { one.options.unit_budget = 1; }),
            "ops 0 to 2: the unit budgets differ");
  EXPECT_EQ(why([](L& one, A&, L&) { one.options.align = 2; }),
            "ops 0 to 2: the alignments differ");
  EXPECT_EQ(why([](L& one, A&, L&) { one.dbias = false; }), "ops 0 to 2: only one bias is frozen");
  EXPECT_EQ(why([](L& one, A&, L&) { one.bias_scale = true; }),
            "ops 0 to 2: the first linear scales its bias");
  EXPECT_EQ(why([](L& one, A&, L&) { one.return_bias = true; }),
            "ops 0 to 2: a linear returns its bias");
  EXPECT_EQ(why([](L& one, A&, L& two) { one.dgrad = one.wgrad = one.bias = two.dgrad = false; }),
            "ops 0 to 2: the second linear has dgrad=no");
  EXPECT_EQ(why([](L& one, A&, L&) { one.x_role = TensorRole::kH; }),
            "ops 0 to 2: the linears have roles of their own");
}

TEST(SequentialText, PrintsItsOpsAndParsesBack) {
  SequentialProblem p = long_row("nvfp4");
  EXPECT_EQ(to_string(mlp_row("mxfp8")),
            "sequential | grouped_linear R=45 N=64 K=10 E=3 recipe=mxfp8 bias=yes | activation "
            "forward swiglu R=45 F=32 E=3 z=bf16 h=bf16 prob=yes | grouped_linear R=45 N=10 K=32 "
            "E=3 recipe=mxfp8 bias=yes bias_scale=yes");
  EXPECT_EQ(parse_sequential_problem(to_string(p)), p);
  EXPECT_EQ(parse_sequential_problem(to_string(unfused(p))), unfused(p));
  EXPECT_EQ(test::invalid([] { parse_sequential_problem("sequential | permute x"); }),
            "sequential: op is 'permute', must be grouped_linear or activation");
  EXPECT_EQ(test::invalid([] { parse_sequential_problem("sequential |"); }),
            "sequential: op is '', must be grouped_linear or activation");
  EXPECT_NE(test::invalid([] {
              parse_sequential_problem("row | activation");
            }).find("must be 'sequential'"),
            std::string::npos);
}

}  // namespace
