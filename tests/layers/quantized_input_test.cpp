// Layers whose x comes as codes and scales: the bits of a layer that quantises it, and what is said
// of copies that do not fit.
#include <gtest/gtest.h>

#include "cadre/sequential.h"
#include "tests/judge/errors.h"
#include "tests/layers/given_copies.h"
#include "tests/layers/linear_case.h"
#include "tests/layers/mlp_case.h"

using namespace cadre;
using test::Counts;
using test::GivenCopies;
using test::LinearCase;
using test::MlpCase;

namespace {

const Counts kCounts{.rows = 75, .of = {0, 33, 1, 40}};

GroupedLinearProblem linear(std::string_view recipe) {
  GroupedLinearProblem p{.rows = 75, .n = 24, .k = 40, .experts = 4};
  p.recipe = parse_recipe(recipe);
  return p;
}

TEST(QuantizedInput, ALinearLayerHasTheBitsOfOneThatQuantises) {
  for (const char* recipe : {"fp8_tensor", "fp8_block", "mxfp8", "nvfp4,wgrad=mxfp8", "nvfp4",
                             "fp8_block,wgrad=bf16", "bf16,wgrad=mxfp8"})
    for (const bool deferred : {false, true}) {
      GroupedLinearProblem p = linear(recipe);
      p.options.deferred = deferred;
      LinearCase want(p, kCounts, 3);
      want.step();
      p.options.quantized_x = true;
      LinearCase got(p, kCounts, 3);
      EXPECT_EQ(find_step<QuantizePlan>(got.plan, "quantize x"), nullptr);
      EXPECT_EQ(got.plan.memory.saved_bytes, 0);
      const GivenCopies copies(p.recipe, got.x, {got.offsets.data(), p.experts});
      got.change_args = [&](GroupedLinearArgs& a) {
        a.x_along_k = copies.along_k;
        a.x_along_rows = copies.along_rows;
        const bool reads_x = find_tensor(got.plan, "x") != nullptr;
        if (!reads_x) a.x = {};
      };
      got.step();
      EXPECT_EQ(first_difference(test::LinearResult(got), test::LinearResult(want)), "") << recipe;
    }
}

TEST(QuantizedInput, AnMlpHasTheBitsOfOneThatQuantises) {
  GroupedMlpProblem p{.rows = 75, .hidden = 40, .features = 32, .experts = 4};
  p.recipe = parse_recipe("mxfp8");
  p.prob = true;
  MlpCase want(p, kCounts, 3);
  want.step();
  p.options.quantized_x = true;
  MlpCase got(p, kCounts, 3);
  const GivenCopies copies(p.recipe, got.x, {got.offsets.data(), p.experts});
  got.change_args = [&](GroupedMlpArgs& a) {
    a.x = {};
    a.x_along_k = copies.along_k;
    a.x_along_rows = copies.along_rows;
  };
  got.step();
  EXPECT_EQ(first_difference(test::MlpResult(got), test::MlpResult(want)), "");
}

TEST(QuantizedInput, AnMlpReadsCodesBesideX) {
  for (const char* recipe : {"mxfp8", "mxfp8,wgrad=bf16", "fp8_block", "fp8_block,wgrad=bf16"})
    for (const bool learns : {false, true}) {
      GroupedMlpProblem p{.rows = 75, .hidden = 40, .features = 32, .experts = 4};
      p.recipe = parse_recipe(recipe);
      if (!learns) p.dgrad = p.wgrad1 = p.wgrad2 = false;
      MlpCase want(p, kCounts, 3);
      want.step();
      p.given_x_along_k = true;
      MlpCase got(p, kCounts, 3);
      const GivenCopies copies(p.recipe, got.x, {got.offsets.data(), p.experts});
      got.change_args = [&](GroupedMlpArgs& a) {
        a.x_along_k = copies.along_k;
        if (!learns) a.x = {};
      };
      got.step();
      EXPECT_EQ(first_difference(test::MlpResult(got), test::MlpResult(want)), "") << recipe;
    }
}

TEST(QuantizedInput, IsKeptByTheCaller) {
  GroupedLinearProblem p = linear("mxfp8");
  p.options.quantized_x = true;
  const GroupedLinearPlan made = plan(p, this_cpu());
  const auto parts = kept(made);
  ASSERT_EQ(parts.size(), 1u);
  EXPECT_EQ(parts[0].name, "x along rows");
  EXPECT_EQ(parts[0].place, Place::kCaller);
  EXPECT_EQ(parts[0].bytes, quantized_bytes(find_tensor(made, "x along rows")->shape));
  p.recipe.fprop.rhs = p.recipe.dgrad.rhs = format(FormatKind::kBf16);
  EXPECT_EQ(plan(p, this_cpu()).refusals[0].why, "x comes in mxfp8");
  EXPECT_EQ(parse_grouped_linear_problem(to_string(p)), p);
}

TEST(QuantizedInputErrors, OfProblems) {
  const auto says = [](std::string_view recipe, bool save_input) {
    GroupedLinearProblem p = linear(recipe);
    p.options.quantized_x = true;
    p.options.save_input = save_input;
    const std::string what = test::invalid([&] { plan(p, this_cpu()); });
    return what.substr(0, what.find(" [grouped_"));
  };
  EXPECT_EQ(says("bf16", false),
            "grouped_linear: quantized_x is yes, must be no; the recipe reads x as it is");
  EXPECT_EQ(says("mxfp8", true),
            "grouped_linear: save_input is yes, must be no; x comes quantised and is not "
            "quantised again");
  GroupedLinearProblem p = linear("mxfp8");
  p.options.quantized_x = true;
  const SequentialProblem row{.ops = {p}};
  EXPECT_EQ(test::invalid([&] {
              plan(row, this_cpu());
            }).find("sequential: quantized_x of op 0 is yes, must be no; a row passes values"),
            0u);
}

TEST(QuantizedInputErrors, OfAnMlpWithCodesBesideX) {
  const auto says = [](auto change) {
    GroupedMlpProblem p{.rows = 75, .hidden = 40, .features = 32, .experts = 4};
    p.recipe = parse_recipe("mxfp8");
    p.given_x_along_k = true;
    change(p);
    const std::string what = test::invalid([&] { plan(p, this_cpu()); });
    return what.substr(0, what.find(" [grouped_"));
  };
  using P = GroupedMlpProblem;
  EXPECT_EQ(says([](P& p) { p.recipe = parse_recipe("bf16"); }),
            "grouped_mlp: given_x_along_k is yes, must be no; the recipe reads x as it is");
  const std::string why =
      "grouped_mlp: given_x_along_k is yes, must be no; quantized_x or gather says how x comes";
  EXPECT_EQ(says([](P& p) { p.options.quantized_x = true; }), why);
  EXPECT_EQ(says([](P& p) { p.gather = true, p.tokens = 9; }), why);
}

TEST(SequentialErrors, OfALinearWithAnActivation) {
  GroupedLinearProblem p = linear("bf16");
  p.activation.emplace().kind = ActivationKind::kRelu;
  const SequentialProblem row{.ops = {p}};
  EXPECT_EQ(
      test::invalid([&] {
        plan(row, this_cpu());
      }).find("sequential: act of op 0 is given, must be absent; an activation is an op of a row"),
      0u);
}

TEST(SequentialErrors, OfALinearThatGathers) {
  for (const auto gathers : {&GroupedLinearProblem::gather, &GroupedLinearProblem::gather_dy}) {
    GroupedLinearProblem p = linear("bf16");
    p.bias = false;
    p.*gathers = true;
    p.tokens = 9;
    const SequentialProblem row{.ops = {p}};
    const std::string what = test::invalid([&] { plan(row, this_cpu()); });
    EXPECT_EQ(what.find(text("sequential: gather", p.gather_dy ? "_dy" : "",
                             " of op 0 is yes, must be no; a row has its rows in expert order")),
              0u)
        << what;
  }
}

TEST(QuantizedInputErrors, OfCopiesThatDoNotFit) {
  const auto says = [](std::string_view recipe, bool backwards, auto change) {
    GroupedLinearProblem p = linear(recipe);
    p.options.quantized_x = true;
    LinearCase c(p, kCounts, 3);
    const GivenCopies copies(p.recipe, c.x, {c.offsets.data(), p.experts});
    GroupedLinearArgs args = c.args();
    args.x_along_k = copies.along_k;
    args.x_along_rows = copies.along_rows;
    change(args);
    const LayerMemory& m = c.plan.memory;
    const test::OwnedWorkspace w(std::max(m.forward_workspace_bytes, m.backward_workspace_bytes));
    const std::string what = test::invalid([&] {
      backwards ? backward(c.plan, args, w.get(), {}) : forward(c.plan, args, w.get(), {});
    });
    return what.substr(0, what.find(" [grouped_"));
  };
  using Args = GroupedLinearArgs;
  const std::string why = "; x comes quantised, in the format of the recipe";
  EXPECT_EQ(says("mxfp8", false, [](Args& a) { a.x_along_k.codes.dtype = DType::kE5m2; }),
            "grouped_linear: x_along_k.codes is e5m2[75, 40], must be e4m3[75, 40]" + why);
  EXPECT_EQ(says("mxfp8", false, [](Args& a) { a.x_along_k.scales.shape[1] = 1; }),
            "grouped_linear: x_along_k.scales is e8m0[75, 1] strides (2, 1), must be "
            "e8m0[75, 2]" +
                why);
  EXPECT_EQ(says("mxfp8", true, [](Args& a) { a.x_along_rows = {}; }),
            "grouped_linear: x_along_rows.codes is f32[], must be e4m3[75, 40]" + why);
  EXPECT_EQ(says("fp8_tensor", false, [](Args& a) { a.x_along_k.expert_scale = nullptr; }),
            "grouped_linear: x_along_k.expert_scale is null, must point to 4 elements" + why);
  EXPECT_EQ(says("fp8_tensor", false, [](Args& a) { a.x_along_k.scales = a.x_along_k.codes; }),
            "grouped_linear: x_along_k.scales is given, must be null" + why);
  float scale = 1;
  EXPECT_EQ(says("mxfp8", false, [&](Args& a) { a.x_along_k.expert_scale = &scale; }),
            "grouped_linear: x_along_k.expert_scale is given, must be null" + why);
}

}  // namespace
