// The expert layer of a routing that is given: the bits of its steps one by one, dropped choices
// among them, and what it complains about.
#include <gtest/gtest.h>

#include "layers/moe.h"
#include "tests/judge/errors.h"
#include "tests/judge/on_machine.h"
#include "tests/layers/expert_layer_copy.h"
#include "tests/layers/moe_case.h"

using namespace cadre;
using test::ExpertLayerCase;
using test::MoeCase;
using test::Values;

namespace {

constexpr int64_t kStep = 8;  // elements between rows, so that TMA takes them

MoeProblem problem(std::string_view recipe = "bf16") {
  MoeProblem p{.tokens = 21, .top_k = 3, .hidden = 24, .features = 16, .experts = 7};
  p.recipe = parse_recipe(recipe);
  p.parameters.dw = DType::kF32;
  p.routed = p.bias1 = p.bias2 = true;
  return p;
}

/// Any experts for any token, some of them twice; with `drops`, some of none.
void choose(ExpertLayerCase& c, unsigned seed, bool drops) {
  std::mt19937 random(seed);
  const int experts = c.sizes.mlp.experts;
  for (int64_t t = 0; t < c.sizes.tokens; ++t)
    for (int64_t j = 0; j < c.sizes.top_k; ++j) {
      const int e = int(random() % unsigned(experts));
      const bool drop = drops && random() % 4 == 0;
      c.experts.data<int32_t>()[t * c.sizes.top_k + j] = !drop ? e : e % 2 == 0 ? -1 : experts;
      c.prob.set({t, j}, double(random() % 1000) / 999);
    }
}

std::string difference(const ExpertLayerCase& got, const ExpertLayerCase& want) {
  std::string all;
  const auto compare = [&](const char* name, const auto& a, const auto& b) {
    const std::string part = test::first_difference(a.values(), b.values());
    if (!part.empty()) all += text(name, " ", part, "; ");
  };
  compare("out", got.out, want.out);
  compare("dx", got.dtokens, want.dtokens);
  compare("dprob", got.dprob, want.dprob);
  compare("dw1", got.mlp.fc1.dw, want.mlp.fc1.dw);
  compare("dw2", got.mlp.fc2.dw, want.mlp.fc2.dw);
  compare("dbias1", got.mlp.fc1.dbias, want.mlp.fc1.dbias);
  compare("dbias2", got.mlp.fc2.dbias, want.mlp.fc2.dbias);
  return all;
}

struct RoutedMoe : test::OnMachine {
  test::MadeFor here(const char* route = "") const { return {machine->device(), kStep, route}; }

  void run(MoeCase& c) {
    test::LayerCopy copy(*machine, c);
    machine->run([&](Stream stream) { copy.step(stream); });
    copy.memory.fetch();
    EXPECT_EQ(copy.memory.damage(), "") << to_string(c.p());
  }
  void run_one_by_one(ExpertLayerCase& c) {
    test::ExpertLayerCopy copy(*machine, c);
    machine->run([&](Stream stream) { copy.step(stream, true); });
    copy.memory().fetch();
  }
  void expect_bits_of_the_steps(MoeCase& got, unsigned seed, bool drops) {
    const MoeProblem& p = got.p();
    ExpertLayerCase want(test::sizes_of(p), seed, here());
    choose(want, seed, drops);
    got.experts = want.experts;
    got.prob = want.prob;
    for (int64_t i = 0; i < layers::rows_of(p); ++i)
      got.wide_experts.data<int64_t>()[i] = want.experts.data<int32_t>()[i];
    run(got);
    run_one_by_one(want);
    EXPECT_EQ(difference(got, want), "") << to_string(p) << " drops " << drops;
    EXPECT_EQ(got.mlp.offsets, want.mlp.offsets) << to_string(p);
  }
};

struct Variant {
  const char* name;
  void (*change)(MoeProblem&);
};
const Variant kVariants[] = {
    {"as it is", [](MoeProblem&) {}},
    {"keep_rows=no", [](MoeProblem& p) { p.keep_rows = false; }},
    {"deferred", [](MoeProblem& p) { p.options.deferred = true; }},
    {"no bias",
     [](MoeProblem& p) {
       p.bias1 = p.bias2 = p.keep_rows = false;
       p.parameters.dw = DType::kBf16;  // for which a kernel gathers
     }},
    {"one expert", [](MoeProblem& p) { p.experts = p.top_k = 1; }},
    {"no token", [](MoeProblem& p) { p.tokens = 0; }},
    {"one token", [](MoeProblem& p) { p.tokens = 1; }},
    {"many experts, few tokens", [](MoeProblem& p) { p.tokens = 3, p.experts = 130; }},
    {"discrete",
     [](MoeProblem& p) { p.parameters.discrete_weight = p.parameters.discrete_dw = true; }}};

TEST_F(RoutedMoe, HasTheBitsOfItsSteps) {
  unsigned seed = 0;
  for (const Variant& variant : kVariants)
    for (const bool drops : {false, true}) {
      SCOPED_TRACE(variant.name);
      MoeProblem p = problem();
      p.index = ++seed / 2 % 2 == 0 ? DType::kI32 : DType::kI64;
      variant.change(p);
      MoeCase c(p, seed, here("permuted"));
      expect_bits_of_the_steps(c, seed, drops);
    }
}

TEST_F(RoutedMoe, HasTheBitsOfItsStepsInEveryRecipe) {
  unsigned seed = 40;
  for (const char* recipe : {"f32", "f16", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4", "mxfp4"}) {
    MoeProblem p = problem(recipe);
    if (is_plain(p.recipe.fprop.lhs)) p.dtype = p.parameters.weight = p.recipe.fprop.lhs.element;
    p.keep_rows = ++seed % 2 == 0;
    MoeCase c(p, seed, here());
    expect_bits_of_the_steps(c, seed, true);
  }
}

// Planned without asking whether it is worth it: where no kernel gathers, fc1's product copies.
TEST_F(RoutedMoe, GatheredHasTheBitsOfItsSteps) {
  unsigned seed = 60;
  for (const Variant& variant : kVariants) {
    SCOPED_TRACE(variant.name);
    MoeProblem p = problem();
    p.features = 32;
    variant.change(p);
    p.keep_rows = false;
    if (p.tokens == 0) continue;  // nothing to gather
    MoeCase c(p, ++seed, here());
    c.take(layers::plan_gathered(p, machine->device()));
    c.plan.name = "gathered";
    if (machine->device().sm == 90) {
      EXPECT_EQ(c.plan.mlp.problem.gather_dy, p.parameters.dw == DType::kBf16) << to_string(p);
    }
    expect_bits_of_the_steps(c, seed, true);
  }
}

TEST(RoutedMoePlan, TakesNoStepOfRouting) {
  const MoeProblem p = parse_moe_problem(
      "moe T=64 top_k=5 H=96 F=64 E=6 act=swiglu recipe=bf16 routed=yes index=i64");
  EXPECT_EQ(to_string(p),
            "moe T=64 top_k=5 H=96 F=64 E=6 act=swiglu recipe=bf16 routed=yes index=i64");
  const MoePlan made = plan(p, this_cpu());
  EXPECT_EQ(made.steps.front().name, "route");
  EXPECT_TRUE(std::holds_alternative<OffsetsPlan>(made.steps.front().plan));
  for (const LayerStep& step : made.steps) EXPECT_NE(step.name, "route backward");
  for (const KeptPart& part : kept(made)) {
    EXPECT_NE(part.name, "logits");
    EXPECT_NE(part.name, "experts");
  }
}

TEST(RoutedMoeErrors, OfProblems) {
  const auto says = [](void (*change)(MoeProblem&)) {
    MoeProblem p = problem();
    change(p);
    const std::string what = test::invalid([&] { plan(p, this_cpu()); });
    return what.substr(0, what.find(" [moe"));
  };
  EXPECT_EQ(says([](MoeProblem& p) { p.index = DType::kF32; }),
            "moe: index is f32, must be i32 or i64");
  EXPECT_EQ(says([](MoeProblem& p) { p.routed = false, p.index = DType::kI64; }),
            "moe: index is i64, must be i32; routed is no, so that no experts are given");
  EXPECT_EQ(says([](MoeProblem& p) { p.normalize = true; }),
            "moe: score, logits, normalize, scale, expert_bias, groups or group_top_k is given, "
            "must not be; routed is yes, so that nothing is chosen here");
  EXPECT_EQ(says([](MoeProblem& p) { p.shared_features = 8; }),
            "moe: shared_F is 8, must be 0; routed is yes, and a shared expert is the caller's "
            "then");
}

/// What a run with changed arguments says, without the problem behind it.
template <class Change>
std::string run_error(const MoeProblem& p, bool is_forward, Change&& change) {
  MoeCase c(p, 1, {});
  choose(c, 1, false);
  const LayerMemory& m = c.plan.memory;
  const test::OwnedWorkspace workspace(
      std::max(m.forward_workspace_bytes, m.backward_workspace_bytes));
  MoeArgs args = c.args();
  change(args);
  const std::string what = test::invalid([&] {
    is_forward ? forward(c.plan, args, workspace.get(), {})
               : backward(c.plan, args, workspace.get(), {});
  });
  EXPECT_TRUE(c.out.untouched(0, p.tokens)) << what;
  return what.substr(0, what.find(" [moe"));
}

float one[256] = {};
int32_t number[64] = {};
const TensorView kLogits = view(one, DType::kF32, {21, 7});

TEST(RoutedMoeErrors, OfForward) {
  const auto says = [](auto&& change) { return run_error(problem(), true, change); };
  EXPECT_EQ(says([](MoeArgs& a) { a.choice = nullptr; }),
            "moe: choice is null, must point to 63 elements; the problem says routed=yes");
  EXPECT_EQ(says([](MoeArgs& a) { a.choice_prob = nullptr; }),
            "moe: choice_prob is null, must point to 63 elements; the problem says routed=yes");
  EXPECT_EQ(says([](MoeArgs& a) {
              a.choice = static_cast<const char*>(a.choice) + 1;
            }).find("moe: choice is at "),
            0u);
  EXPECT_EQ(says([](MoeArgs& a) { a.logits = kLogits; }),
            "moe: logits is given, must be null; the problem says routed=yes");
  EXPECT_EQ(says([](MoeArgs& a) { a.scores = one; }),
            "moe: scores is given, must be null; the problem says routed=yes");
  EXPECT_EQ(says([](MoeArgs& a) { a.prob = one; }),
            "moe: prob is given, must be null; the problem says routed=yes");
  EXPECT_EQ(says([](MoeArgs& a) { a.experts = number; }),
            "moe: experts is given, must be null; the problem says routed=yes");
}

TEST(RoutedMoeErrors, OfBackward) {
  MoeProblem frozen = problem();
  const auto says = [&](auto&& change) { return run_error(frozen, false, change); };
  EXPECT_EQ(says([](MoeArgs& a) { a.dchoice_prob = nullptr; }),
            "moe: dchoice_prob is null, must point to 63 elements; the problem says dlogits=yes");
  EXPECT_EQ(says([](MoeArgs& a) { a.dscores = one; }),
            "moe: dscores is given, must be null; the problem says routed=yes");
  EXPECT_EQ(says([](MoeArgs& a) { a.dlogits = kLogits; }),
            "moe: dlogits is given, must be null; the problem says routed=yes");
  frozen.dlogits = false;
  EXPECT_EQ(says([](MoeArgs& a) { a.dchoice_prob = one; }),
            "moe: dchoice_prob is given, must be null; the problem says dlogits=no");
}

TEST(RoutedMoeErrors, OfLayersThatChoose) {
  MoeProblem chooses = problem();
  chooses.routed = false;
  EXPECT_EQ(run_error(chooses, true, [](MoeArgs& a) { a.choice = number; }),
            "moe: choice is given, must be null; the problem says routed=no");
  EXPECT_EQ(run_error(chooses, true, [](MoeArgs& a) { a.choice_prob = one; }),
            "moe: choice_prob is given, must be null; the problem says routed=no");
  EXPECT_EQ(run_error(chooses, false, [](MoeArgs& a) { a.dchoice_prob = one; }),
            "moe: dchoice_prob is given, must be null; the problem says routed=no");
}

}  // namespace
