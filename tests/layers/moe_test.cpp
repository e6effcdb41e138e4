// The expert layer as one plan: the bits of its steps one by one, within the bound of a loop over
// experts in double, and equal bits however it runs.
#include "cadre/moe.h"

#include <gtest/gtest.h>

#include "layers/moe.h"
#include "tests/judge/errors.h"
#include "tests/judge/on_machine.h"
#include "tests/layers/expert_layer_copy.h"
#include "tests/layers/moe_case.h"
#include "tests/layers/moe_model.h"

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
  p.normalize = p.bias1 = p.bias2 = true;
  return p;
}

struct Variant {
  const char* name;
  void (*change)(MoeProblem&);
};

std::string difference(const ExpertLayerCase& got, const ExpertLayerCase& want) {
  std::string all;
  const auto a = results(got), b = results(want);
  for (size_t i = 0; i < a.size(); ++i) {
    const std::string part = test::first_difference(a[i].second, b[i].second);
    if (!part.empty()) all += text(a[i].first, " ", part, "; ");
  }
  return all;
}

struct Moe : test::OnMachine {
  test::MadeFor here() const { return {machine->device(), kStep}; }

  /// A step of the layer on the machine, and everything back on the host.
  void run(MoeCase& c, bool by_queue = true) {
    test::LayerCopy copy(*machine, c);
    machine->run([&](Stream stream) { copy.step(stream, by_queue); });
    copy.memory.fetch();
    EXPECT_EQ(copy.memory.damage(), "") << to_string(c.p());
  }
  void run_one_by_one(ExpertLayerCase& c) {
    test::ExpertLayerCopy copy(*machine, c);
    machine->run([&](Stream stream) { copy.step(stream); });
    copy.memory().fetch();
  }

  void expect_bits_of_the_steps(const MoeProblem& p, unsigned seed) {
    MoeCase got(p, seed, here());
    ExpertLayerCase want(test::sizes_of(p), seed, here());
    run(got);
    run_one_by_one(want);
    EXPECT_EQ(difference(got, want), "") << to_string(p);
    EXPECT_EQ(got.mlp.offsets, want.mlp.offsets) << to_string(p);
    EXPECT_EQ(got.experts.bytes() == want.experts.bytes(), true) << to_string(p);
  }
};

const Variant kRoutings[] = {
    {"softmax", [](MoeProblem& p) { p.normalize = false; }},
    {"topk_softmax",
     [](MoeProblem& p) {
       p.score = RoutingScore::kTopKSoftmax;
       p.scale = 2.5f;
       p.bias2 = false;
     }},
    {"sigmoid, bf16 logits",
     [](MoeProblem& p) {
       p.score = RoutingScore::kSigmoid;
       p.expert_bias = true;
       p.logits = DType::kBf16;
     }},
    {"groups",
     [](MoeProblem& p) {
       p.experts = 8;
       p.groups = 4;
       p.group_top_k = 2;
       p.bias1 = false;
     }},
    {"shared expert",
     [](MoeProblem& p) {
       p.shared_features = 40;
       p.bias1 = false;
     }},
    {"gated shared expert",
     [](MoeProblem& p) {
       p.shared_features = 8;
       p.shared_gate = true;
       p.experts = p.top_k = 1;
     }},
    {"shared expert, no token",
     [](MoeProblem& p) {
       p.shared_features = 8;
       p.tokens = 0;
     }},
    {"one expert", [](MoeProblem& p) { p.experts = p.top_k = 1; }},
    {"all experts", [](MoeProblem& p) { p.top_k = 7; }},
    {"no token", [](MoeProblem& p) { p.tokens = 0; }},
    {"many experts, few tokens",
     [](MoeProblem& p) {
       p.tokens = 3;
       p.experts = 130;
     }},
};

TEST_F(Moe, HasTheBitsOfItsSteps) {
  unsigned seed = 0;
  for (const Variant& routing : kRoutings) {
    SCOPED_TRACE(routing.name);
    MoeProblem p = problem();
    routing.change(p);
    expect_bits_of_the_steps(p, ++seed);
  }
}

TEST_F(Moe, HasTheBitsOfItsStepsInEveryRecipe) {
  unsigned seed = 20;
  for (const char* recipe :
       {"f32", "f16", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4", "mxfp4", "bf16,wgrad=mxfp8"}) {
    MoeProblem p = problem(recipe);
    if (recipe_list()[seed % 3].recipe == p.recipe || std::string(recipe) == "f16") {
      p.dtype = p.parameters.weight = p.recipe.fprop.lhs.element;
    }
    p.activation = ActivationKind(++seed % 10);
    p.shared_features = seed % 2 == 0 ? 0 : 48;
    p.shared_gate = seed % 4 == 1;
    p.options.accumulate = Accumulate(seed % 4);
    p.options.accumulate_bias = Accumulate(seed / 4 % 4);
    expect_bits_of_the_steps(p, seed);
  }
}

const Variant kGathered[] = {{"keep_rows=no", [](MoeProblem&) {}},
                             {"no dw of fc1",
                              [](MoeProblem& p) {
                                p.wgrad1 = false;
                                p.keep_rows = true;
                              }},
                             {"deferred", [](MoeProblem& p) { p.options.deferred = true; }},
                             {"shared expert",
                              [](MoeProblem& p) {
                                p.shared_features = 40;
                                p.shared_gate = true;
                              }},
                             {"ungated, discrete",
                              [](MoeProblem& p) {
                                p.activation = ActivationKind::kRelu;
                                p.parameters.discrete_weight = p.parameters.discrete_dw = true;
                              }},
                             {"many experts, few tokens",
                              [](MoeProblem& p) {
                                p.tokens = 3;
                                p.experts = 130;
                              }},
                             {"one expert", [](MoeProblem& p) { p.experts = p.top_k = 1; }},
                             {"nothing to learn", [](MoeProblem& p) {
                                p.dgrad = p.dlogits = p.wgrad1 = p.wgrad2 = p.dbias = false;
                              }}};

// Planned without asking whether it is worth it: where no kernel gathers, fc1's product copies.
TEST_F(Moe, GatheredHasTheBitsOfPermuted) {
  unsigned seed = 30;
  for (const Variant& variant : kGathered) {
    SCOPED_TRACE(variant.name);
    MoeProblem p = problem();
    p.keep_rows = false;
    variant.change(p);
    for (const bool shows_prob : {true, false}) {
      MoeCase want(p, ++seed, {machine->device(), kStep, "permuted"}), got(p, seed, here());
      got.take(layers::plan_gathered(p, machine->device()));
      got.plan.name = "gathered";
      for (MoeCase* c : {&want, &got})
        if (!shows_prob) c->change_args = [](MoeArgs& a) { a.prob = nullptr; };
      run(want);
      run(got);
      EXPECT_EQ(difference(got, want), "") << to_string(p);
    }
  }
}

TEST_F(Moe, KeepsNoMoreInARecipeThanInBf16) {
  const auto planned = [&](MoeProblem p, const char* recipe) {
    p.recipe = parse_recipe(recipe);
    return plan(p, machine->device());
  };
  for (const bool shares : {false, true}) {
    MoeProblem p = problem();
    p.keep_rows = false;
    p.tokens = 512;
    if (shares) p.shared_features = 40;
    const MoePlan plain = planned(p, "bf16");
    for (const char* recipe : {"fp8_block", "fp8_block,pinned", "fp8_block,wgrad=bf16",
                               "fp8_tensor", "mxfp8", "mxfp4", "nvfp4", "bf16,wgrad=mxfp8"}) {
      const MoePlan made = planned(p, recipe);
      EXPECT_LE(bytes_per_token(kept(made), p.tokens), bytes_per_token(kept(plain), p.tokens))
          << to_string(made.problem);
    }
    // Random codes would be others in backward. Few codes are x and more, where a router keeps it.
    p.keep_h = true;
    for (const auto& [top_k, recipe, keeps_codes] :
         {std::tuple(5, "nvfp4,wgrad=nvfp4*nvfp4:sr", true),
          {1, "nvfp4", false},
          {1, "mxfp8", false}}) {
      p.top_k = top_k;
      const MoePlan made = planned(p, recipe);
      EXPECT_EQ(layers::keeps(made.mlp, "x along rows"), keeps_codes) << to_string(made.problem);
      EXPECT_EQ(layers::keeps(made.mlp, "tokens"), !keeps_codes) << to_string(made.problem);
    }
  }
}

TEST_F(Moe, GatheredHasTheBitsOfPermutedInRecipesThatQuantiseX) {
  unsigned seed = 60;
  for (const char* recipe : {"fp8_block", "fp8_block,wgrad=bf16", "fp8_tensor", "mxfp8", "nvfp4"})
    for (const Variant& variant : kGathered) {
      if (++seed % 3 != 0 && machine->device().sm != 0) continue;  // each recipe has others then
      SCOPED_TRACE(variant.name);
      MoeProblem p = problem(recipe);
      p.keep_rows = false;
      variant.change(p);
      p.keep_rows = seed % 4 == 0 && p.recipe.wgrad.rhs.kind != FormatKind::kBf16;
      MoeCase want(p, seed, {machine->device(), kStep, "permuted"});
      MoeCase got(p, seed, {machine->device(), kStep, "gathered"});
      run(want);
      run(got);
      EXPECT_EQ(difference(got, want), "") << to_string(p);
    }
}

// The route by its name, which wants a kernel that gathers. Those for dw write 16 bits alone, and a
// bias's gradient is of rows.
TEST_F(Moe, IsGatheredByAKernel) {
  if (machine->device().sm != 90) GTEST_SKIP() << "the kernel is for Hopper";
  unsigned seed = 90;
  for (const char* recipe : {"bf16", "f16"})
    for (const bool gathers_dw : {false, true}) {
      MoeProblem p = problem(recipe);
      p.bias2 = seed / 2 % 2 == 0;
      p.dtype = p.parameters.weight = p.recipe.fprop.lhs.element;
      if (gathers_dw) p.parameters.dw = p.dtype;
      p.features = 32;
      p.keep_rows = false;
      MoeCase want(p, ++seed, {machine->device(), kStep, "permuted"});
      MoeCase got(p, seed, {machine->device(), kStep, "gathered"});
      EXPECT_EQ(got.plan.mlp.name, "fused");
      EXPECT_EQ(got.plan.mlp.problem.gather_dw, gathers_dw);
      EXPECT_EQ(got.plan.mlp.problem.gather_dy, gathers_dw && !p.bias2);
      run(want);
      run(got);
      EXPECT_EQ(difference(got, want), "") << to_string(p);
    }
}

TEST_F(Moe, AGatheredDoutHasTheBitsOfRows) {
  if (machine->device().sm != 90) GTEST_SKIP() << "the kernel is for Hopper";
  const Variant variants[] = {
      {"all learns", [](MoeProblem&) {}},
      {"shared expert", [](MoeProblem& p) { p.shared_features = 40, p.shared_gate = true; }},
      {"frozen w2", [](MoeProblem& p) { p.wgrad2 = false; }},
      {"weights alone", [](MoeProblem& p) { p.dgrad = p.dlogits = false; }},
      {"w2 alone", [](MoeProblem& p) { p.dgrad = p.dlogits = p.wgrad1 = p.dbias = false; }},
      {"keep_h", [](MoeProblem& p) { p.keep_h = true; }},
      {"dz over z", [](MoeProblem& p) { p.options.overwrite_saved = true; }},
      {"relu", [](MoeProblem& p) { p.activation = ActivationKind::kRelu, p.bias1 = false; }},
      {"discrete",
       [](MoeProblem& p) { p.parameters.discrete_weight = p.parameters.discrete_dw = true; }}};
  unsigned seed = 120;
  for (const Variant& variant : variants) {
    SCOPED_TRACE(variant.name);
    MoeProblem p = problem(++seed % 2 == 0 ? "bf16" : "f16");
    p.dtype = p.parameters.weight = p.parameters.dw = p.recipe.fprop.lhs.element;
    p.features = 32;
    p.keep_rows = p.bias2 = false;
    variant.change(p);
    MoeCase want(p, seed, {machine->device(), kStep, "permuted"});
    MoeCase got(p, seed, {machine->device(), kStep, "gathered"});
    EXPECT_TRUE(got.plan.mlp.problem.gather_dy);
    run(want);
    run(got);
    EXPECT_EQ(difference(got, want), "") << to_string(p);
  }
}

// It would be looked at by the experts, who know it by another name.
TEST_F(Moe, AGatheredDwReadsX) {
  if (machine->device().sm != 90) GTEST_SKIP() << "the kernel is for Hopper";
  MoeProblem p = problem();
  p.parameters.dw = DType::kBf16;
  p.features = 32;
  p.keep_rows = false;
  MoeCase c(p, 1, {machine->device(), kStep, "gathered"});
  MoeArgs args = c.args();
  args.x = {};
  test::OwnedWorkspace workspace(c.plan.memory.backward_workspace_bytes);
  const std::string what = test::invalid([&] { backward(c.plan, args, workspace.get(), {}); });
  EXPECT_EQ(what.find("moe: x is f32[], must be bf16[21, 24]"), 0u) << what;
}

const Variant kVariants[] = {
    {"keep_rows=no", [](MoeProblem& p) { p.keep_rows = false; }},
    {"keep_h", [](MoeProblem& p) { p.keep_h = true; }},
    {"deferred", [](MoeProblem& p) { p.options.deferred = true; }},
    {"deferred keep_rows=no",
     [](MoeProblem& p) {
       p.options.deferred = true;
       p.keep_rows = false;
     }},
    {"overwrite_saved keep_rows=no",
     [](MoeProblem& p) {
       p.options.overwrite_saved = true;
       p.keep_rows = false;
     }},
    {"overwrite_saved keep_h deferred",
     [](MoeProblem& p) { p.options.overwrite_saved = p.keep_h = p.options.deferred = true; }},
    {"cache_weights", [](MoeProblem& p) { p.options.cache_weights = true; }},
    {"save_input", [](MoeProblem& p) { p.options.save_input = true; }},
    {"save_input keep_rows=no deferred",
     [](MoeProblem& p) {
       p.options.save_input = p.options.deferred = true;
       p.keep_rows = false;
     }},
    {"discrete", [](MoeProblem& p) {
       p.parameters.discrete_weight = p.parameters.discrete_dw = true;
       p.parameters.discrete_bias = true;
     }}};

TEST_F(Moe, HowItRunsChangesNoBit) {
  unsigned seed = 40;
  for (const char* recipe : {"bf16", "mxfp8"}) {
    MoeProblem p = problem(recipe);
    p.shared_features = 40;
    p.shared_gate = true;
    p.options.accumulate = Accumulate::kDevice;
    MoeCase want(p, ++seed, here());
    run(want);
    for (const Variant& variant : kVariants) {
      SCOPED_TRACE(variant.name);
      MoeProblem other = p;
      variant.change(other);
      for (bool by_queue : {true, false}) {
        if (!by_queue && !other.options.deferred) continue;
        MoeCase got(other, seed, here());
        run(got, by_queue);
        EXPECT_EQ(difference(got, want), "") << to_string(other);
      }
    }
  }
}

TEST_F(Moe, BackwardMayRunAgain) {
  for (const bool keep_rows : {false, true}) {
    MoeProblem p = problem();
    p.shared_features = 24;
    p.keep_rows = keep_rows;
    MoeCase once(p, 45, here()), twice(p, 45, here());
    run(once);
    test::LayerCopy copy(*machine, twice);
    machine->run([&](Stream stream) {
      copy.step(stream);
      const test::MovedArgs moved(copy.memory, twice.args());
      backward(twice.plan, moved.args, copy.backward_workspace(), stream);
    });
    copy.memory.fetch();
    EXPECT_EQ(difference(twice, once), "") << to_string(p);
  }
}

TEST_F(Moe, NobodyHasToSeeProbabilitiesAndScores) {
  MoeCase want(problem(), 50, here()), got(problem(), 50, here());
  got.change_args = [](MoeArgs& a) { a.prob = a.scores = nullptr; };
  run(want);
  run(got);
  EXPECT_TRUE(got.prob.untouched(0, got.p().tokens) && got.scores.untouched(0, got.p().tokens));
  want.prob.poison();
  want.scores.poison();
  EXPECT_EQ(difference(got, want), "");
}

/// What is frozen changes nothing of the rest, and is not written.
TEST_F(Moe, FrozenPartsAreNotTouchedAndChangeNothing) {
  MoeProblem whole = problem();
  whole.shared_features = 8;
  whole.shared_gate = true;
  MoeCase all(whole, 60, here());
  run(all);
  const auto want = results(all);
  const auto masks = unsigned(machine->draws(32));
  for (unsigned turn = 0; turn < masks; ++turn) {
    const unsigned mask = 11 * turn % 32;  // every part frozen and not, also in few
    MoeProblem p = whole;
    p.dgrad = mask & 1;
    p.dlogits = mask & 2;
    p.wgrad1 = mask & 4;
    p.wgrad2 = mask & 8;
    p.dbias = (mask & 16) || p.dlogits;
    p.keep_rows = mask % 3 == 0;
    MoeCase some(p, 60, here());
    run(some);
    const bool wanted[] = {true,     true,    true,    p.dgrad,  p.dlogits, p.wgrad1,
                           p.wgrad2, p.dbias, p.dbias, p.wgrad1, p.wgrad2,  p.dlogits};
    const auto got = results(some);
    for (size_t i = 0; i < got.size(); ++i) {
      const Values poison(got[i].second.size(), std::nan(""));
      EXPECT_EQ(test::first_difference(got[i].second, wanted[i] ? want[i].second : poison), "")
          << got[i].first << " of " << to_string(p);
    }
  }
}

TEST_F(Moe, IsALoopOverExpertsWithinTheBound) {
  for (bool keep_rows : {true, false}) {
    MoeProblem p = problem("f32");
    p.tokens = 19;
    p.score = RoutingScore::kTopKSoftmax;
    p.normalize = false;
    p.dtype = p.parameters.weight = p.parameters.bias = p.parameters.dbias = DType::kF32;
    p.keep_rows = p.shared_gate = keep_rows;
    p.shared_features = 32;
    MoeCase c(p, 70, here());
    c.change_args = [](MoeArgs& a) { a.dscores = nullptr; };
    const test::MoeModel model(c);
    run(c);
    const auto near = [&](const char* what, const Values& got,
                          const std::vector<test::Sized>& want) {
      Values values, bounds;
      for (const test::Sized& number : want) {
        values.push_back(number.value);
        bounds.push_back(test::gamma(model.roundings(), number.size));
      }
      EXPECT_EQ(test::difference(got, values, bounds, p.hidden), "") << what;
    };
    near("out", c.out.values(), model.out);
    near("dx", c.dtokens.values(), model.dx);
    near("dlogits", c.dlogits.values(), model.dlogits);
    near("dw1", c.mlp.fc1.dw.values(), model.experts.dw1);
    near("dw2", c.mlp.fc2.dw.values(), model.experts.dw2);
    near("dbias1", c.mlp.fc1.dbias.values(), model.experts.dbias1);
    near("dbias2", c.mlp.fc2.dbias.values(), model.experts.dbias2);
    near("shared dw1", c.shared->fc1.dw.values(), model.shared.dw1);
    near("shared dw2", c.shared->fc2.dw.values(), model.shared.dw2);
    if (p.shared_gate) near("dshared_gate", c.shared->dprob.values(), model.dgate);
  }
}

TEST_F(Moe, ARecordingFollowsTheRouter) {
  for (bool keep_rows : {true, false}) {
    MoeProblem p = problem();
    p.keep_rows = keep_rows;
    p.options.deferred = !keep_rows;
    p.shared_features = keep_rows ? 0 : 24;
    MoeCase first(p, 80, here());
    test::LayerCopy live(*machine, first);
    machine->run([&](Stream stream) { live.step(stream); });
    const auto graph = machine->record([&](Stream stream) { live.step(stream); });
    std::vector<std::vector<int32_t>> offsets;
    for (double skew : {0.0, 1.0, -1.0}) {
      const unsigned seed = 81 + unsigned(offsets.size());
      MoeCase want(p, seed, here(), skew), got(p, seed, here(), skew);
      run(want);
      test::LayerCopy own(*machine, got);
      live.memory.upload_from(own.memory);
      graph->replay();
      own.memory.fetch_from(live.memory);
      EXPECT_EQ(test::byte_difference(got, want), "") << "skew " << skew;
      offsets.push_back(got.mlp.offsets);
    }
    EXPECT_NE(offsets[1], offsets[0]);
    EXPECT_NE(offsets[2], offsets[1]);
  }
}

}  // namespace
