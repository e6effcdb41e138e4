// Every complaint of a grouped linear layer, and that nothing was launched before it.
#include <gtest/gtest.h>

#include "cadre/grouped_linear.h"
#include "tests/judge/errors.h"
#include "tests/layers/linear_case.h"

using namespace cadre;
using test::Counts;
using test::LinearCase;

namespace {

const Counts kCounts{.rows = 8, .of = {3, 4}};

GroupedLinearProblem problem(std::string_view recipe = "bf16") {
  GroupedLinearProblem p{.rows = 8, .n = 6, .k = 4, .experts = 2};
  p.recipe = parse_recipe(recipe);
  return p;
}

/// What planning a changed problem says, without the problem behind it.
template <class Change>
std::string plan_error(Change&& change, std::string_view recipe = "bf16") {
  GroupedLinearProblem p = problem(recipe);
  change(p);
  const std::string what = test::invalid([&] { plan(p, this_cpu()); });
  return what.substr(0, what.find(" [grouped_linear"));
}

TEST(GroupedLinearErrors, OfProblems) {
  using P = GroupedLinearProblem;
  EXPECT_EQ(plan_error([](P& p) { p.rows = -1; }), "grouped_linear: R is -1, must be 0 or more");
  EXPECT_EQ(plan_error([](P& p) { p.rows = int64_t(1) << 31; }),
            "grouped_linear: R is 2147483648, must be below 2^31; rows are numbered in int32");
  EXPECT_EQ(plan_error([](P& p) { p.n = 0; }), "grouped_linear: N is 0, must be 1 or more");
  EXPECT_EQ(plan_error([](P& p) { p.k = 0; }), "grouped_linear: K is 0, must be 1 or more");
  EXPECT_EQ(plan_error([](P& p) { p.experts = 0; }), "grouped_linear: E is 0, must be 1 or more");
  EXPECT_EQ(plan_error([](P& p) { p.dtype = DType::kI32; }),
            "grouped_linear: dtype is i32, must be f32, bf16 or f16");
  EXPECT_EQ(plan_error([](P& p) { p.parameters.weight = DType::kE4m3; }),
            "grouped_linear: weight is e4m3, must be f32, bf16 or f16");
  EXPECT_EQ(plan_error([](P& p) { p.parameters.bias = DType::kU8; }),
            "grouped_linear: bias_dtype is u8, must be f32, bf16 or f16");
  EXPECT_EQ(plan_error([](P& p) { p.parameters.dw = DType::kI64; }),
            "grouped_linear: dw is i64, must be f32, bf16 or f16");
  EXPECT_EQ(plan_error([](P& p) { p.parameters.dbias = DType::kI64; }),
            "grouped_linear: dbias_dtype is i64, must be f32, bf16 or f16");
  EXPECT_EQ(plan_error([](P& p) { p.options.amax_eps = -1; }),
            "grouped_linear: amax_eps is -1, must be finite and 0 or more");
  EXPECT_EQ(plan_error([](P& p) { p.options.unit_budget = -1; }),
            "grouped_linear: unit_budget is -1, must be 0 or more");
  EXPECT_EQ(plan_error([](P& p) { p.options.align = 24; }),
            "grouped_linear: align is 24, must be a power of two; it counts bytes");
  EXPECT_EQ(plan_error([](P& p) { p.bias_scale = true; }),
            "grouped_linear: bias_scale is yes, must be no; the problem has no bias");
  EXPECT_EQ(plan_error([](P& p) { p.return_bias = true; }),
            "grouped_linear: return_bias is yes, must be no; the problem has no bias");
  EXPECT_EQ(plan_error([](P& p) { p.bias = p.bias_scale = p.return_bias = true; }),
            "grouped_linear: bias_scale is yes, must be no; a returned bias is scaled by the "
            "caller");
  EXPECT_EQ(plan_error([](P& p) { p.parameters.weight_major = Major::kColumn; }, "mxfp8"),
            "grouped_linear: weight_major is column, must be row; the recipe copies the weights");
  EXPECT_EQ(plan_error(
                [](P& p) {
                  p.options.save_input = true;
                  p.recipe.wgrad.rhs.stochastic = true;
                },
                "nvfp4"),
            "grouped_linear: save_input is yes, must be no; x is rounded stochastically for wgrad, "
            "and a second quantisation would give other codes");
  EXPECT_EQ(plan_error([](P& p) { p.recipe.fprop.lhs.hadamard = true; }, "nvfp4"),
            "recipe: fprop is nvfp4:rht*nvfp4:2d, must have rht on both operands or on none; the "
            "product is unchanged only then");
}

TEST(GroupedLinearErrors, OfABiasThatIsReturnedBehindAnActivation) {
  EXPECT_EQ(plan_error([](GroupedLinearProblem& p) {
              p.bias = p.return_bias = true;
              p.activation.emplace();
            }),
            "grouped_linear: return_bias is yes, must be no; the bias comes before the activation");
}

TEST(GroupedLinearErrors, OfText) {
  EXPECT_EQ(
      test::invalid([] { parse_grouped_linear_problem("grouped_linear R=1 X=2"); }).substr(0, 28),
      "problem: name is 'X', must b");
  EXPECT_EQ(test::invalid([] {
              parse_grouped_linear_problem("grouped_linear recipe=fp6");
            }).substr(0, 30),
            "recipe: name is 'fp6', must be");
}

TEST(GroupedLinearErrors, UnsupportedNamesTheReason) {
  const std::string what =
      test::unsupported([] { plan(problem("mxfp8"), {.kind = DeviceKind::kCuda, .sm = 75}); });
  EXPECT_NE(what.find("no implementation on sm_75"), std::string::npos) << what;
}

enum Run { kForward, kBackward, kWgrad };

/// What a run with changed arguments says, without the problem behind it; and that no output was
/// touched.
template <class Change>
std::string run_error(const GroupedLinearProblem& p, Run which, Change&& change) {
  LinearCase c(p, kCounts, 1);
  const LayerMemory& m = c.plan.memory;
  const int64_t bytes[] = {m.forward_workspace_bytes, m.backward_workspace_bytes,
                           m.wgrad_workspace_bytes};
  const test::OwnedWorkspace workspace(bytes[which] + 256);
  GroupedLinearArgs args = c.args();
  Workspace w = workspace.get();
  change(args, w);
  const test::LinearResult before(c);
  const std::string what = test::invalid([&] {
    (which == kForward ? forward : which == kBackward ? backward : wgrad)(c.plan, args, w, {});
  });
  EXPECT_TRUE(c.y.untouched(0, 8) && c.dx.untouched(0, 8)) << what;
  EXPECT_EQ(first_difference(test::LinearResult(c), before), "") << what;
  EXPECT_NE(what.find(" [grouped_linear R=8"), std::string::npos) << what;
  return what.substr(0, what.find(" [grouped_linear"));
}
using Args = GroupedLinearArgs;

TEST(GroupedLinearErrors, OfForward) {
  const auto says = [](auto change, std::string_view recipe = "bf16") {
    GroupedLinearProblem p = problem(recipe);
    p.bias = p.bias_scale = true;
    return run_error(p, kForward, change);
  };
  EXPECT_EQ(says([](Args& a, Workspace&) { a.offsets.experts = 3; }),
            "grouped_linear: offsets.experts is 3, must be 2; the experts of the problem");
  EXPECT_EQ(says([](Args& a, Workspace&) { a.offsets.data = nullptr; }),
            "grouped_linear: offsets.data is null, must point to 3 elements");
  EXPECT_EQ(says([](Args& a, Workspace&) { a.x.shape[0] = 9; }),
            "grouped_linear: x is bf16[9, 4] strides (7, 1), must be bf16[8, 4]");
  EXPECT_EQ(says([](Args& a, Workspace&) { a.x.dtype = DType::kF16; }),
            "grouped_linear: x is f16[8, 4] strides (7, 1), must be bf16[8, 4]");
  EXPECT_EQ(says([](Args& a, Workspace&) { a.y = {}; }),
            "grouped_linear: y is f32[], must be bf16[8, 6]");
  EXPECT_EQ(says([](Args& a, Workspace&) { a.parameters.w.stride[2] = 2; }),
            "grouped_linear: w is bf16[2, 6, 4] strides (24, 4, 2), must have rows of stride 1 "
            "that do not overlap; make it contiguous");
  EXPECT_EQ(says([](Args& a, Workspace&) { a.x.stride[0] = INT64_MAX; }),
            "grouped_linear: x is bf16[8, 4] strides (9223372036854775807, 1), must have strides "
            "that reach 2^44 elements at most");
  EXPECT_EQ(says([](Args& a, Workspace&) { a.parameters.bias.data = nullptr; }),
            "grouped_linear: bias is null, must be bf16[2, 6]");
  EXPECT_EQ(says([](Args& a, Workspace&) { a.bias_scale = nullptr; }),
            "grouped_linear: bias_scale is null, must point to 8 elements");
  EXPECT_EQ(says([](Args& a, Workspace&) { a.saved.bytes -= 1; }, "mxfp8"),
            "grouped_linear: saved is 511 bytes, must be 512 or more; plan.memory says how much");
  EXPECT_EQ(says([](Args& a, Workspace&) { a.saved.data = nullptr; }, "mxfp8"),
            "grouped_linear: saved is null, must be 512 bytes");
  EXPECT_NE(says([](Args& a, Workspace&) { a.saved.data = static_cast<char*>(a.saved.data) + 4; },
                 "mxfp8")
                .find("must be aligned to 256 bytes"),
            std::string::npos);
  EXPECT_NE(says([](Args&, Workspace& w) { w.bytes = 0; }, "mxfp8")
                .find("grouped_linear: workspace is 0 bytes, must be "),
            std::string::npos);
}

TEST(GroupedLinearErrors, OfDiscreteParameters) {
  GroupedLinearProblem discrete = problem();
  discrete.bias = true;
  discrete.parameters.discrete_weight = discrete.parameters.discrete_bias = true;
  EXPECT_EQ(
      run_error(discrete, kForward, [](Args& a, Workspace&) { a.parameters.discrete_w = nullptr; }),
      "grouped_linear: discrete_w is null, must point to 2 pointers; the problem says that w is "
      "discrete");
  EXPECT_EQ(run_error(discrete, kForward,
                      [](Args& a, Workspace&) { a.parameters.discrete_bias = nullptr; }),
            "grouped_linear: discrete_bias is null, must point to 2 pointers; the problem says "
            "that bias is discrete");
  EXPECT_EQ(
      run_error(discrete, kForward,
                [](Args& a, Workspace&) {
                  a.parameters.w = view(nullptr, DType::kBf16, {2, 6, 4}, {30, 5, 1});
                }),
      "grouped_linear: w is bf16[2, 6, 4] strides (30, 5, 1), must be empty, or bf16[2, 6, 4] "
      "at null; the problem says that it is discrete");
  EXPECT_EQ(run_error(discrete, kForward,
                      [](Args& a, Workspace&) {
                        a.parameters.bias = view(a.x.data, DType::kBf16, {2, 6});
                      }),
            "grouped_linear: bias is bf16[2, 6] with data, must be empty, or bf16[2, 6] at null; "
            "the problem says that it is discrete");
  EXPECT_NE(run_error(discrete, kForward,
                      [](Args& a, Workspace&) {
                        a.parameters.discrete_w = reinterpret_cast<const void* const*>(
                            reinterpret_cast<const char*>(a.parameters.discrete_w) + 4);
                      })
                .find("must be aligned to 8 bytes"),
            std::string::npos);
}

TEST(GroupedLinearErrors, OfForwardWithOtherLayouts) {
  GroupedLinearProblem column = problem();
  column.parameters.weight_major = Major::kColumn;
  EXPECT_EQ(run_error(column, kForward,
                      [](Args& a, Workspace&) {
                        a.parameters.w.stride[1] = 4;
                        a.parameters.w.stride[2] = 1;
                      }),
            "grouped_linear: w is bf16[2, 6, 4], must be bf16[2, 6, 4] strides (24, 1, 6); the "
            "problem says weight_major=column");
  GroupedLinearProblem cached = problem("mxfp8");
  cached.options.cache_weights = true;
  EXPECT_EQ(run_error(cached, kForward, [](Args& a, Workspace&) { a.weight_cache = {}; }),
            "grouped_linear: weight_cache is 0 bytes, must be 1024 or more; plan.memory says how "
            "much");
  GroupedLinearProblem drawing = problem("nvfp4");
  drawing.recipe.fprop.lhs.stochastic = true;
  EXPECT_EQ(run_error(drawing, kForward, [](Args& a, Workspace&) { a.rng = nullptr; }),
            "grouped_linear: rng is null, must point to 2 elements; the recipe rounds "
            "stochastically");
}

TEST(GroupedLinearErrors, OfBackward) {
  const auto says = [](auto change, std::string_view recipe = "bf16") {
    GroupedLinearProblem p = problem(recipe);
    p.bias = p.bias_scale = true;
    p.parameters.dw = DType::kF32;
    p.options.accumulate_bias = Accumulate::kPerExpert;
    return run_error(p, kBackward, change);
  };
  EXPECT_EQ(says([](Args& a, Workspace&) { a.dy.shape[1] = 5; }),
            "grouped_linear: dy is bf16[8, 5] strides (7, 1), must be bf16[8, 6]");
  EXPECT_EQ(says([](Args& a, Workspace&) { a.dx.data = nullptr; }),
            "grouped_linear: dx is null, must be bf16[8, 4] strides (11, 1)");
  EXPECT_EQ(says([](Args& a, Workspace&) { a.parameters.w = {}; }),
            "grouped_linear: w is f32[], must be bf16[2, 6, 4]");
  EXPECT_EQ(says([](Args& a, Workspace&) { a.x = {}; }),
            "grouped_linear: x is f32[], must be bf16[8, 4]; wgrad reads it as it is");
  EXPECT_EQ(says([](Args& a, Workspace&) { a.parameters.dbias = {}; }),
            "grouped_linear: dbias is f32[], must be bf16[2, 6]");
  EXPECT_EQ(says([](Args& a, Workspace&) { a.parameters.accumulate_bias = nullptr; }),
            "grouped_linear: accumulate_bias is null, must point to 2 elements; every expert has "
            "its word");
  EXPECT_EQ(says([](Args& a, Workspace&) { a.dbias_scale = nullptr; }),
            "grouped_linear: dbias_scale is null, must point to 8 elements");
  EXPECT_EQ(says([](Args& a, Workspace&) { a.rng = nullptr; }, "nvfp4"),
            "grouped_linear: rng is null, must point to 2 elements; the recipe rounds "
            "stochastically");
  EXPECT_EQ(says([](Args& a, Workspace&) { a.saved = {}; }, "mxfp8"),
            "grouped_linear: saved is 0 bytes, must be 512 or more; plan.memory says how much");
  EXPECT_NE(says([](Args&, Workspace& w) { w.data = nullptr; }, "mxfp8")
                .find("grouped_linear: workspace is null, must be "),
            std::string::npos);
  WgradQueue queue(1);
  EXPECT_EQ(says([&](Args& a, Workspace&) { a.queue = &queue; }),
            "grouped_linear: queue is given, must be null; the problem says deferred=no");
}

// A gradient of another shape, another type or with gaps is never written.
TEST(GroupedLinearErrors, OfTheWeightGradient) {
  GroupedLinearProblem p = problem();
  p.parameters.dw = DType::kF32;
  p.options.accumulate = Accumulate::kDevice;
  const auto says = [&](auto change) {
    return run_error(p, kBackward, [&](Args& a, Workspace&) { change(a.parameters); });
  };
  const std::string place = "; a gradient is written in place, so it has this very layout";
  EXPECT_EQ(says([](LinearParameters& o) { o.dw.shape[1] = 5; }),
            "grouped_linear: dw is f32[2, 5, 4] strides (24, 4, 1), must be f32[2, 6, 4]" + place);
  EXPECT_EQ(says([](LinearParameters& o) {
              o.dw.stride = {64, 8, 1};
            }),
            "grouped_linear: dw is f32[2, 6, 4] strides (64, 8, 1), must be f32[2, 6, 4]" + place);
  EXPECT_EQ(says([](LinearParameters& o) { o.dw.dtype = DType::kBf16; }),
            "grouped_linear: dw is bf16[2, 6, 4], must be f32[2, 6, 4]" + place);
  EXPECT_EQ(says([](LinearParameters& o) { o.dw.data = nullptr; }),
            "grouped_linear: dw is null, must be f32[2, 6, 4]");
  EXPECT_EQ(says([](LinearParameters& o) { o.accumulate = nullptr; }),
            "grouped_linear: accumulate is null, must point to 1 element; one word decides");

  p.parameters.discrete_dw = true;
  EXPECT_EQ(says([](LinearParameters& o) { o.discrete_dw = nullptr; }),
            "grouped_linear: discrete_dw is null, must point to 2 pointers; the problem says that "
            "dw is discrete");
  EXPECT_EQ(
      says([](LinearParameters& o) {
        o.dw = view(nullptr, DType::kF32, {2, 6, 4}, {24, 1, 6});
      }),
      "grouped_linear: dw is f32[2, 6, 4] strides (24, 1, 6), must be empty, or f32[2, 6, 4] at "
      "null; the problem says that it is discrete");
}

TEST(GroupedLinearErrors, OfRunsThatMakeNoSense) {
  GroupedLinearProblem inference = problem();
  inference.dgrad = inference.wgrad = false;
  EXPECT_EQ(run_error(inference, kBackward, [](Args&, Workspace&) {}),
            "grouped_linear: dgrad, wgrad and dbias are no, must be yes for one of them; backward "
            "has nothing to compute");
  EXPECT_EQ(run_error(problem(), kWgrad, [](Args&, Workspace&) {}),
            "grouped_linear: no weight gradient is deferred, must be one; plan with deferred=yes "
            "and wgrad=yes");
  GroupedLinearProblem deferred = problem("mxfp8");
  deferred.options.deferred = true;
  EXPECT_EQ(run_error(deferred, kWgrad, [](Args& a, Workspace&) { a.pending = {}; }),
            "grouped_linear: pending is 0 bytes, must be 512 or more; plan.memory says how much");
  EXPECT_EQ(run_error(deferred, kBackward, [](Args& a, Workspace&) { a.pending = {}; }),
            "grouped_linear: pending is 0 bytes, must be 512 or more; plan.memory says how much");

  const GroupedLinearPlan empty;
  EXPECT_EQ(test::invalid([&] { forward(empty, {}, {}, {}); }).substr(0, 59),
            "grouped_linear: the plan is empty; make it with plan() [gro");
}

}  // namespace
