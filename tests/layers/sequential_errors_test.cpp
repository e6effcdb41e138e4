// Every complaint of a row of operations, and that nothing was launched before it.
#include <gtest/gtest.h>

#include "tests/judge/errors.h"
#include "tests/layers/row_case.h"

using namespace cadre;
using test::each_linear;
using test::first_difference;
using test::kRowCounts;
using test::mlp_row;
using test::OwnedWorkspace;
using test::RowCase;
using test::Tensor;
using test::unfused;

namespace {

std::string plan_error(const SequentialProblem& p) {
  const std::string what = test::invalid([&] { plan(p, this_cpu()); });
  return what.substr(0, what.find(" [sequential"));
}

TEST(SequentialErrors, OfProblems) {
  EXPECT_EQ(plan_error({}), "sequential: the row has 0 ops, must be 1 or more");
  SequentialProblem p = mlp_row("bf16");
  std::get<ActivationProblem>(p.ops[1]).rows = 44;
  EXPECT_EQ(plan_error(p), "sequential: R of op 1 is 44, must be 45; all ops see the same rows");
  p = mlp_row("bf16");
  std::get<GroupedLinearProblem>(p.ops[2]).experts = 4;
  EXPECT_EQ(plan_error(p), "sequential: E of op 2 is 4, must be 3; all ops see the same experts");
  p = mlp_row("bf16");
  std::get<GroupedLinearProblem>(p.ops[2]).k = 31;
  EXPECT_EQ(plan_error(p),
            "sequential: input of op 2 has 31 columns, must be 32; op 1 writes as many");
  p = mlp_row("bf16");
  std::get<ActivationProblem>(p.ops[1]).z = DType::kF32;
  EXPECT_EQ(plan_error(p), "sequential: input of op 1 is f32, must be bf16; op 0 writes that");
  p = mlp_row("bf16");
  std::get<GroupedLinearProblem>(p.ops[2]).dgrad = false;
  EXPECT_EQ(plan_error(p), "sequential: dgrad of op 2 is no, must be yes; an op before it learns");
}

/// What a run with changed arguments says, without the problem behind it; and that nothing was
/// launched.
template <class Change>
std::string run_error(bool backwards, Change&& change, bool fuse = true) {
  SequentialProblem p = mlp_row("bf16");
  p.fuse = fuse;
  RowCase c(p, kRowCounts, 1);
  change(c);
  const auto before = c.result();
  const std::string what = test::invalid([&] { backwards ? c.run_backward() : c.run_forward(); });
  const auto after = c.result();
  for (size_t i = 0; i < after.size(); ++i)
    EXPECT_EQ(first_difference(after[i], before[i]), "") << what;
  return what.substr(0, what.find(" ["));
}

TEST(SequentialErrors, OfOpArguments) {
  for (bool fuse : {true, false}) {
    const auto says = [&](std::vector<OpArgument> given, bool backwards = false) {
      return run_error(
          backwards, [&](RowCase& c) { c.op_arguments = given; }, fuse);
    };
    const Tensor z(DType::kBf16, {45, 64}), small(DType::kBf16, {44, 64});
    EXPECT_EQ(says({{.op = 3, .key = "output", .value = z.view()}}),
              "sequential: op of op_arguments[0] is 3, must be -3 to 2; the row has 3 ops");
    EXPECT_EQ(says({{.op = -4, .key = "output", .value = z.view()}}),
              "sequential: op of op_arguments[0] is -4, must be -3 to 2; the row has 3 ops");
    EXPECT_EQ(says({{.op = 0, .key = "out", .value = z.view()}}),
              "sequential: key of op_arguments[0] is 'out', must be output or grad_input");
    EXPECT_EQ(says({{.op = -2, .key = "output", .value = z.view()}}),
              "sequential: key of op_arguments[0] is 'output', must not be given to op 1; an "
              "activation takes no arguments");
    EXPECT_EQ(says({{.op = 0, .key = "output"}}),
              "sequential: value of op_arguments[0] is empty, must be a tensor");
    EXPECT_EQ(says({{.op = 0, .key = "output", .value = z.view()},
                    {.op = -3, .key = "output", .value = z.view()}}),
              "sequential: op_arguments[1] repeats output of op 0, must be given once");
    EXPECT_EQ(says({{.op = 2, .key = "output", .value = z.view()}}),
              "sequential: y is given, must be empty; it is the output of op 2 too");
    EXPECT_EQ(says({{.op = 0, .key = "grad_input", .value = z.view()}}, true),
              "sequential: dx is given, must be empty; it is the grad_input of op 0 too");
    EXPECT_NE(says({{.op = 0, .key = "output", .value = small.view()}})
                  .find(" is bf16[44, 64], must be bf16[45, 64]"),
              std::string::npos);
    EXPECT_NE(says({{.op = 2, .key = "grad_input", .value = z.view()}}, true)
                  .find(" is bf16[45, 64], must be bf16[45, 32]"),
              std::string::npos);
  }
}

TEST(SequentialErrors, OfTheOtherArguments) {
  const auto forward_says = [](auto change, bool fuse = true) {
    return run_error(false, change, fuse);
  };
  const auto backward_says = [](auto change, bool fuse = true) {
    return run_error(true, change, fuse);
  };
  EXPECT_EQ(forward_says([](RowCase& c) { c.parameters.pop_back(); }),
            "sequential: parameters has 1 entries, must be 2; one for each grouped_linear");
  EXPECT_EQ(forward_says([](RowCase& c) { c.extra_inputs.pop_back(); }),
            "sequential: extra_inputs has 1 entries, must be 2; one for each bias_scale and prob, "
            "in op order");
  EXPECT_EQ(forward_says([](RowCase& c) { c.extra_inputs[1] = nullptr; }),
            "sequential: extra_inputs[1] is null, must point to 45 elements");
  EXPECT_EQ(backward_says([](RowCase& c) { c.extra_gradients.pop_back(); }),
            "sequential: extra_gradients has 1 entries, must be 2; one for each extra input");
  EXPECT_EQ(backward_says([](RowCase& c) { c.extra_gradients[1] = nullptr; }, false),
            "grouped_linear: dbias_scale is null, must point to 45 elements");
  EXPECT_EQ(forward_says([](RowCase& c) { c.gives_y = false; }, false),
            "sequential: y is f32[], must be bf16[45, 10]");
  EXPECT_EQ(forward_says([](RowCase& c) { c.saved = OwnedWorkspace(0); }),
            "sequential: saved is 0 bytes, must be 5888 or more; plan.memory says how much");
  WgradQueue queue(1);
  EXPECT_EQ(backward_says([&](RowCase& c) { c.queue = &queue; }),
            "sequential: queue is given, must be null; no op of the row is deferred");
  EXPECT_EQ(
      test::invalid([] { RowCase(mlp_row("bf16"), kRowCounts, 1).run_wgrad(); }).substr(0, 85),
      "sequential: no op of the row is deferred, must be one or more; plan with "
      "deferred=yes");
  const SequentialPlan empty;
  EXPECT_EQ(test::invalid([&] { forward(empty, {}, {}, {}); }),
            "sequential: the plan is empty; make it with plan() [sequential]");
}

TEST(SequentialErrors, OfQueuesAndFrozenStarts) {
  const SequentialProblem deferred =
      each_linear(mlp_row("bf16"), [](GroupedLinearProblem& l) { l.options.deferred = true; });
  RowCase c(deferred, kRowCounts, 1);
  WgradQueue queue(1);
  c.queue = &queue;
  c.run_forward();
  EXPECT_NE(test::invalid([&] {
              c.run_backward();
            }).find("sequential: queue has 0 of 1 tasks, must have room for 2"),
            std::string::npos);
  c.queue = nullptr;
  c.pending = OwnedWorkspace(0);
  EXPECT_NE(test::invalid([&] { c.run_backward(); }).find("sequential: pending is 0 bytes"),
            std::string::npos);

  SequentialProblem frozen = unfused(mlp_row("bf16"));
  auto& one = std::get<GroupedLinearProblem>(frozen.ops[0]);
  auto& two = std::get<GroupedLinearProblem>(frozen.ops[2]);
  one.wgrad = one.bias = two.dgrad = false;
  RowCase row(frozen, kRowCounts, 1);
  row.run_forward();
  EXPECT_EQ(test::invalid([&] { row.run_backward(); }).substr(0, 113),
            "sequential: extra_gradients[0] is given, must be null; backward stops behind its op, "
            "which has dgrad=no [sequenti");
  row.extra_gradients[0] = nullptr;
  EXPECT_NO_THROW(row.run_backward());
}

}  // namespace
