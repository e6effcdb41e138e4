// What the expert MLP plans and what it complains about.
#include <gtest/gtest.h>

#include "cadre/grouped_mlp.h"
#include "tests/judge/errors.h"
#include "tests/layers/mlp_case.h"

using namespace cadre;
using test::Counts;
using test::MlpCase;

namespace {

GroupedMlpProblem problem(std::string_view recipe) {
  GroupedMlpProblem p{.rows = 640, .hidden = 96, .features = 64, .experts = 5};
  p.recipe = parse_recipe(recipe);
  p.prob = true;
  return p;
}
GroupedMlpPlan planned(const GroupedMlpProblem& p) { return plan(p, this_cpu()); }
bool has(const LayerPlan& plan, std::string_view step) {
  return std::any_of(plan.steps.begin(), plan.steps.end(),
                     [&](const LayerStep& own) { return own.name == step; });
}

TEST(GroupedMlpText, PrintsWhatIsNotUsualAndParsesBack) {
  GroupedMlpProblem p = problem("mxfp8");
  EXPECT_EQ(to_string(p), "grouped_mlp R=640 H=96 F=64 E=5 act=swiglu recipe=mxfp8 prob=yes");
  p.activation = ActivationKind::kClampedSwiGlu;
  p.constants.limit = 5;
  p.layout = GluLayout::kInterleave32;
  p.wgrad1 = false;
  p.keep_h = true;
  EXPECT_EQ(to_string(p),
            "grouped_mlp R=640 H=96 F=64 E=5 act=clamped_swiglu layout=interleave32 limit=5 "
            "recipe=mxfp8 prob=yes wgrad1=no keep_h=yes");
  EXPECT_EQ(parse_grouped_mlp_problem(to_string(p)), p);
}

TEST(GroupedMlpText, EveryFieldParsesBack) {
  std::mt19937 random(1);
  const auto draw = [&](unsigned end) { return int(random() % end); };
  for (int i = 0; i < 300; ++i) {
    GroupedMlpProblem p{.rows = draw(99), .hidden = draw(99), .features = draw(99)};
    p.experts = draw(9);
    p.activation = ActivationKind(draw(10));
    if (p.activation == ActivationKind::kClampedSwiGlu)
      p.constants = {float(draw(9)), float(draw(9)) / 3, float(draw(3))};
    p.layout = GluLayout(draw(3));
    p.recipe = recipe_list()[size_t(draw(8))].recipe;
    for (DType* type : {&p.dtype, &p.parameters.weight, &p.parameters.bias, &p.parameters.dw,
                        &p.parameters.dbias})
      *type = DType(draw(3));
    for (bool* flag :
         {&p.parameters.discrete_weight, &p.parameters.discrete_bias, &p.parameters.discrete_dw,
          &p.prob, &p.bias1, &p.bias2, &p.bias2_scale, &p.dgrad, &p.wgrad1, &p.wgrad2, &p.dbias,
          &p.dprob, &p.options.deferred, &p.keep_h, &p.options.save_input, &p.options.cache_weights,
          &p.options.quantized_x, &p.options.quantized_w, &p.gather})
      *flag = draw(2);
    p.given_x_along_k = draw(2);
    p.tokens = draw(99);
    p.top_k = draw(9);
    p.parameters.weight_major = Major(draw(2));
    p.options.accumulate = Accumulate(draw(4));
    p.options.accumulate_bias = Accumulate(draw(4));
    p.options.tail = Tail(draw(2));
    p.options.amax_eps = float(draw(3)) / 7;
    p.options.unit_budget = draw(3);
    p.options.align = 1 << draw(6);
    EXPECT_EQ(parse_grouped_mlp_problem(to_string(p)), p) << to_string(p);
  }
}

TEST(GroupedMlpPlan, NamesItsRouteAndExplainsIt) {
  GroupedMlpProblem p = problem("mxfp8");
  p.bias1 = p.options.deferred = true;
  const GroupedMlpPlan made = planned(p);
  EXPECT_EQ(made.name, "unfused");
  EXPECT_EQ(plan(p, this_cpu(), "unfused").name, "unfused");
  EXPECT_TRUE(made.exact);
  const std::string words = explain(made);
  for (const char* part : {"route unfused", "fc1: grouped_linear R=640 N=128 K=96", "activation: ",
                           "activation backward: ", "z, prob, dh -> h again, dz, dprob",
                           "fc2: grouped_linear R=640 N=96 K=64",
                           "kept for backward, of each row: z ", "pending from backward to wgrad"})
    EXPECT_NE(words.find(part), std::string::npos) << part << " in\n" << words;
  constexpr std::string_view kInGradient = "dh and h again lie in dw of fc1, which is written last";
  EXPECT_EQ(words.find(kInGradient), std::string::npos);
  p.options.deferred = false;
  EXPECT_NE(explain(planned(p)).find(kInGradient), std::string::npos);
}

/// Bytes kept of one row, by the name of the part.
double kept_of(const GroupedMlpPlan& plan, std::string_view name) {
  for (const KeptPart& part : kept(plan))
    if (part.name == name) return bytes_per_token({&part, 1}, plan.problem.rows);
  return 0;
}

TEST(GroupedMlpPlan, StatesTheBytesOfAToken) {
  // bf16: x and z, two bytes an element, and the probability; h is computed again.
  const GroupedMlpPlan direct = planned(problem("bf16"));
  EXPECT_DOUBLE_EQ(bytes_per_token(kept(direct), 640), 2 * 96 + 2 * 128 + 4);
  EXPECT_EQ(direct.memory.saved_bytes, 640 * 2 * 128);
  GroupedMlpProblem p = problem("bf16");
  p.keep_h = true;
  EXPECT_DOUBLE_EQ(bytes_per_token(kept(planned(p)), 640, 2), 2 * (2 * 96 + 2 * 128 + 4 + 2 * 64));

  // mxfp8: x as codes along rows with a scale for 32 of them (and one more for every expert).
  const GroupedMlpPlan mxfp8 = planned(problem("mxfp8"));
  EXPECT_NEAR(kept_of(mxfp8, "x along rows"), 96 * (1 + 1.0 / 32), 96 * 5.0 / 640 + 1);
  EXPECT_DOUBLE_EQ(kept_of(mxfp8, "z"), 2 * 128);
  EXPECT_DOUBLE_EQ(kept_of(mxfp8, "h along rows"), 0);
  p = problem("mxfp8");
  p.keep_h = true;
  EXPECT_NEAR(kept_of(planned(p), "h along rows"), 64 * (1 + 1.0 / 32), 64 * 5.0 / 640 + 1);

  // Frozen first weights: x is not kept. Inference: nothing is.
  p.wgrad1 = false;
  EXPECT_DOUBLE_EQ(kept_of(planned(p), "x along rows"), 0);
  p.dgrad = p.wgrad2 = p.dbias = p.dprob = false;
  EXPECT_TRUE(kept(planned(p)).empty());
  EXPECT_EQ(planned(p).memory.saved_bytes, 0);
}

TEST(GroupedMlpPlan, FrozenPartsTakeNoStep) {
  GroupedMlpProblem p = problem("bf16");
  p.dgrad = p.wgrad1 = false;
  EXPECT_TRUE(has(planned(p), "activation backward"));  // the probability learns
  p.dprob = false;
  const GroupedMlpPlan last = planned(p);
  EXPECT_FALSE(has(last, "activation backward") || has(last.fc2, "dx") || has(last, "fc1 dw"));
  EXPECT_TRUE(has(last, "h again") && has(last, "fc2 dw") && has(last.fc2, "dw"));
  p.keep_h = true;
  EXPECT_FALSE(has(planned(p), "h again"));
  EXPECT_EQ(find_tensor(planned(p), "z")->place, Place::kWorkspace);
}

TEST(GroupedMlpErrors, OfProblems) {
  const auto says = [](auto change) {
    GroupedMlpProblem p = problem("nvfp4");
    change(p);
    const std::string what = test::invalid([&] { planned(p); });
    return what.substr(0, what.find(" [grouped_mlp"));
  };
  using P = GroupedMlpProblem;
  EXPECT_EQ(says([](P& p) { p.hidden = 0; }), "grouped_mlp: H is 0, must be 1 or more");
  EXPECT_EQ(says([](P& p) { p.features = 0; }), "grouped_mlp: F is 0, must be 1 or more");
  EXPECT_EQ(says([](P& p) { p.experts = 0; }), "grouped_mlp: E is 0, must be 1 or more");
  EXPECT_EQ(says([](P& p) { p.bias2_scale = true; }),
            "grouped_mlp: bias2_scale is yes, must be no; the problem says bias2=no");
  EXPECT_EQ(says([](P& p) { p.recipe.wgrad.rhs.stochastic = true; }),
            "grouped_mlp: keep_h is no, must be yes; h is rounded stochastically for wgrad, and "
            "computing it again would give other codes");
  EXPECT_EQ(
      says([](P& p) {
        p.layout = GluLayout::kInterleave32;
        p.features = 33;
      }),
      "grouped_mlp: F is 33, must be a multiple of 32; layout interleave32 comes in blocks of "
      "32");
}

TEST(GroupedMlpErrors, OfRoutes) {
  EXPECT_EQ(test::invalid([] { plan(problem("bf16"), this_cpu(), "best"); }),
            "plan: route is 'best', must be one of fused, codes, unfused "
            "[grouped_mlp R=640 H=96 F=64 E=5 act=swiglu recipe=bf16 prob=yes]");
  const GroupedMlpPlan plain = plan(problem("bf16"), this_cpu());
  EXPECT_EQ(plain.name, "unfused");
  ASSERT_EQ(plain.refusals.size(), 1u);
  EXPECT_EQ(plain.refusals[0].why, "is for GPUs; on the CPU the operations run one by one");
}

enum Run { kForward, kBackward, kWgrad };
using Args = GroupedMlpArgs;

/// What a run with changed arguments says, without the problem behind it; and that no output was
/// touched.
template <class Change>
std::string run_error(const GroupedMlpProblem& p, Run which, Change&& change) {
  MlpCase c(p, {.rows = 8, .of = {3, 4}}, 1);
  c.shows_inside = true;
  const LayerMemory& m = c.plan.memory;
  const int64_t bytes[] = {m.forward_workspace_bytes, m.backward_workspace_bytes,
                           m.wgrad_workspace_bytes};
  const test::OwnedWorkspace workspace(bytes[which] + 256);
  Args args = c.args();
  Workspace w = workspace.get();
  change(args, w);
  const test::MlpResult before(c);
  const std::string what = test::invalid([&] {
    if (which == kForward) forward(c.plan, args, w, {});
    if (which == kBackward) backward(c.plan, args, w, {});
    if (which == kWgrad) wgrad(c.plan, args, w, {});
  });
  EXPECT_EQ(first_difference(test::MlpResult(c), before), "") << what;
  EXPECT_TRUE(c.z.untouched(0, 8) && c.dh.untouched(0, 8)) << what;
  return what.substr(0, what.find(" [grouped_"));
}

GroupedMlpProblem small(std::string_view recipe = "bf16") {
  GroupedMlpProblem p{.rows = 8, .hidden = 6, .features = 4, .experts = 2};
  p.recipe = parse_recipe(recipe);
  p.prob = p.bias1 = p.bias2 = true;
  return p;
}

TEST(GroupedMlpErrors, OfForward) {
  const auto says = [](auto change) {
    return run_error(small(), kForward, [&](Args& a, Workspace&) { change(a); });
  };
  EXPECT_EQ(says([](Args& a) { a.prob = nullptr; }),
            "grouped_mlp: prob is null, must point to 8 elements; the problem says prob=yes");
  EXPECT_EQ(says([](Args& a) { a.z.shape[1] = 7; }),
            "grouped_mlp: z is bf16[8, 7] strides (10, 1), must be bf16[8, 8]");
  EXPECT_EQ(says([](Args& a) { a.x = {}; }), "grouped_mlp fc1: x is f32[], must be bf16[8, 6]");
  EXPECT_EQ(says([](Args& a) { a.fc1.w.shape[1] = 4; }),
            "grouped_mlp fc1: w is bf16[2, 4, 6] strides (48, 6, 1), must be bf16[2, 8, 6]");
  EXPECT_EQ(says([](Args& a) { a.fc2.w.dtype = DType::kF32; }),
            "grouped_mlp fc2: w is f32[2, 6, 4], must be bf16[2, 6, 4]");
  EXPECT_EQ(says([](Args& a) { a.fc2.bias = {}; }),
            "grouped_mlp fc2: bias is f32[], must be bf16[2, 6]");
  EXPECT_EQ(says([](Args& a) { a.y.data = nullptr; }),
            "grouped_mlp fc2: y is null, must be bf16[8, 6] strides (11, 1)");
  EXPECT_EQ(says([](Args& a) { a.offsets.experts = 1; }),
            "grouped_mlp fc1: offsets.experts is 1, must be 2; the experts of the problem");
  EXPECT_EQ(says([](Args& a) { a.saved = {}; }),
            "grouped_mlp: saved is 0 bytes, must be 256 or more; plan.memory says how much");
  EXPECT_NE(run_error(small(), kForward, [](Args&, Workspace& w) { w = {}; })
                .find("grouped_mlp: workspace is 0 bytes, must be "),
            std::string::npos);
  GroupedMlpProblem without = small();
  without.prob = false;
  const float one = 1;
  EXPECT_EQ(run_error(without, kForward, [&](Args& a, Workspace&) { a.prob = &one; }),
            "grouped_mlp: prob is given, must be null; the problem says prob=no");
  GroupedMlpProblem cached = small("mxfp8");
  cached.options.cache_weights = true;
  EXPECT_EQ(run_error(cached, kForward, [&](Args& a, Workspace&) { a.weight_cache = {}; }),
            "grouped_mlp: weight_cache is 0 bytes, must be 2048 or more; plan.memory says how "
            "much");
}

TEST(GroupedMlpErrors, OfBackward) {
  const auto says = [](auto change) {
    return run_error(small(), kBackward, [&](Args& a, Workspace&) { change(a); });
  };
  EXPECT_EQ(says([](Args& a) { a.dy.shape[0] = 7; }),
            "grouped_mlp fc2: dy is bf16[7, 6] strides (7, 1), must be bf16[8, 6]");
  EXPECT_EQ(says([](Args& a) { a.dh.shape[1] = 5; }),
            "grouped_mlp fc2: dx is bf16[8, 5] strides (6, 1), must be bf16[8, 4]");
  EXPECT_EQ(says([](Args& a) { a.dx = {}; }), "grouped_mlp fc1: dx is f32[], must be bf16[8, 6]");
  EXPECT_EQ(says([](Args& a) { a.fc1.dw.stride[0] = 100; }),
            "grouped_mlp fc1: dw is bf16[2, 8, 6] strides (100, 6, 1), must be bf16[2, 8, 6]; a "
            "gradient is written in place, so it has this very layout");
  EXPECT_EQ(says([](Args& a) { a.fc2.dbias.shape[1] = 5; }),
            "grouped_mlp fc2: dbias is bf16[2, 5] strides (6, 1), must be bf16[2, 6]");
  WgradQueue queue(1);
  EXPECT_EQ(says([&](Args& a) { a.queue = &queue; }),
            "grouped_mlp: queue is given, must be null; the problem says deferred=no");
  EXPECT_NE(run_error(small(), kBackward, [](Args&, Workspace& w) { w = {}; })
                .find("grouped_mlp: workspace is 0 bytes, must be "),
            std::string::npos);
  GroupedMlpProblem no_dprob = small();
  no_dprob.dprob = false;
  float dprob[8];
  EXPECT_EQ(run_error(no_dprob, kBackward, [&](Args& a, Workspace&) { a.dprob = dprob; }),
            "grouped_mlp: dprob is given, must be null; the problem says prob=no or dprob=no");
  GroupedMlpProblem inference = small();
  inference.dgrad = inference.wgrad1 = inference.wgrad2 = false;
  inference.dbias = inference.dprob = false;
  EXPECT_EQ(run_error(inference, kBackward, [](Args&, Workspace&) {}),
            "grouped_mlp: dgrad, wgrad1, wgrad2, dbias and dprob are no, must be yes for one of "
            "them; backward has nothing to compute");
}

TEST(GroupedMlpErrors, OfDeferredWeightGradients) {
  GroupedMlpProblem deferred = small();
  deferred.options.deferred = true;
  EXPECT_EQ(run_error(deferred, kBackward, [](Args& a, Workspace&) { a.pending.bytes -= 1; }),
            "grouped_mlp: pending is 511 bytes, must be 512 or more; plan.memory says how much");
  EXPECT_EQ(run_error(deferred, kWgrad, [](Args& a, Workspace&) { a.pending.data = nullptr; }),
            "grouped_mlp: pending is null, must be 512 bytes");
  WgradQueue queue(1);
  EXPECT_EQ(run_error(deferred, kBackward, [&](Args& a, Workspace&) { a.queue = &queue; }),
            "grouped_mlp: queue has 0 of 1 tasks, must have room for 2; make a larger one");
  EXPECT_EQ(run_error(small(), kWgrad, [](Args&, Workspace&) {}),
            "grouped_mlp: no weight gradient is deferred, must be one or more; plan with "
            "deferred=yes and wgrad1=yes or wgrad2=yes");
  const GroupedMlpPlan empty;
  EXPECT_EQ(test::invalid([&] { forward(empty, {}, {}, {}); }).substr(0, 57),
            "grouped_mlp: the plan is empty; make it with plan() [grou");
}

}  // namespace
