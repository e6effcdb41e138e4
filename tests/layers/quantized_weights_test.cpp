// Layers whose weights come as codes and scales, on a machine: the bits of a layer that quantises
// them, by every route, and what is said of codes that do not fit.
#include <gtest/gtest.h>

#include "cadre/moe.h"
#include "tests/judge/errors.h"
#include "tests/judge/on_machine.h"
#include "tests/layers/layer_copy.h"
#include "tests/layers/mlp_case.h"

using namespace cadre;
using test::Counts;
using test::first_difference;
using test::LayerCopy;
using test::LinearCase;
using test::MadeFor;
using test::MlpCase;
using test::OwnedWorkspace;

namespace {

constexpr int64_t kStep = 8;  // elements between rows, so that TMA takes them

/// The copy of weights that fprop reads, as a checkpoint has it.
struct GivenWeights {
  OwnedWorkspace bytes;
  QuantizedView copy;

  GivenWeights(const GroupedLinearProblem& p, const TensorView& w, const uint64_t* rng)
      : bytes(quantized_bytes(shape(p))) {
    QuantizeProblem q{.kind = RowsKind::kWeights, .rows = p.n, .cols = p.k, .experts = p.experts};
    q.source = w.dtype;
    q.role = TensorRole::kW;
    q.along_k = p.recipe.fprop.rhs;
    copy = quantized_view(shape(p), bytes.get().data);
    QuantizeArgs args{.source = w};
    args.along_k = copy;
    args.rng = rng;
    const QuantizePlan made = plan(q, this_cpu());
    const OwnedWorkspace workspace(made.workspace_bytes);
    run(made, args, workspace.get(), {});
  }
  template <class Visit>
  void for_pieces(Visit&& visit) const {
    test::Piece piece = test::piece("w as codes", bytes);
    piece.holds = test::Holds::kInput;
    visit(piece);
  }

 private:
  static QuantizedShape shape(const GroupedLinearProblem& p) {
    return {RowsKind::kWeights, p.n, p.k, p.experts, p.recipe.fprop.rhs};
  }
};

/// In place of the weights themselves, which nothing may read.
void give(LinearParameters& parameters, const GivenWeights& weights) {
  parameters.w = {};
  parameters.quantized_w = weights.copy;
}

struct GivenLinear : LinearCase {
  GivenWeights w;

  GivenLinear(const GroupedLinearProblem& p, const Counts& c, unsigned seed, const MadeFor& where)
      : LinearCase(p, c, seed, where), w(p, parameters.w.view(), rng.data()) {}

  GroupedLinearArgs args() {
    GroupedLinearArgs a = LinearCase::args();
    give(a.parameters, w);
    return a;
  }
  template <class Visit>
  void for_pieces(Visit&& visit) const {
    LinearCase::for_pieces(visit);
    w.for_pieces(visit);
  }
};

struct GivenMlp : MlpCase {
  GivenWeights w1, w2;

  GivenMlp(const GroupedMlpProblem& p, const Counts& c, unsigned seed, const MadeFor& where)
      : MlpCase(p, c, seed, where),
        w1(plan.fc1.problem, fc1.w.view(), rng.data()),
        w2(plan.fc2.problem, fc2.w.view(), rng.data()) {}

  GroupedMlpArgs args() {
    GroupedMlpArgs a = MlpCase::args();
    give(a.fc1, w1);
    give(a.fc2, w2);
    return a;
  }
  template <class Visit>
  void for_pieces(Visit&& visit) const {
    MlpCase::for_pieces(visit);
    w1.for_pieces(visit);
    w2.for_pieces(visit);
  }
};

constexpr const char* kRecipes[] = {
    "mxfp4",
    "bf16,fprop=bf16*nvfp4",
    "bf16,fprop=bf16*mxfp8:2d",
    "bf16,fprop=fp8_block:fp32*fp8_block:2d+fp32",
    "fp8_block",
    "fp8_tensor",
    "mxfp8",
    "bf16,fprop=fp8_row*fp8_row",
};

GroupedLinearProblem linear_in(const char* recipe) {
  GroupedLinearProblem p{.rows = 75, .n = 144, .k = 96, .experts = 4};
  p.recipe = parse_recipe(recipe);
  p.bias = true;
  p.dgrad = p.wgrad = p.dbias = false;
  return p;
}

GroupedMlpProblem mlp_in(const char* recipe) {
  GroupedMlpProblem p{.rows = 75, .hidden = 96, .features = 64, .experts = 4};
  p.recipe = parse_recipe(recipe);
  p.activation = ActivationKind::kClampedSwiGlu;
  p.layout = GluLayout::kInterleave1;
  p.prob = p.bias1 = p.bias2 = true;
  p.dgrad = p.wgrad1 = p.wgrad2 = p.dbias = p.dprob = false;
  return p;
}

const Counts kCounts{.rows = 75, .of = {17, 0, 33, 20}};

struct QuantizedWeights : test::OnMachine {
  MadeFor here(std::string_view route = {}) const { return {machine->device(), kStep, route}; }

  template <class Case>
  test::Values y_of(Case& c) {
    LayerCopy copy(*machine, c);
    machine->run([&](Stream stream) { copy.step(stream); });
    copy.memory.fetch();
    EXPECT_EQ(copy.memory.damage() + c.damage(), "") << to_string(c.p());
    return used_rows(c.y, c.counts);
  }
};

/// On Hopper weights of a plain batch are multiplied packed, or decoded first.
TEST_F(QuantizedWeights, HaveTheBitsOfALayerThatQuantises) {
  for (const char* recipe : kRecipes) {
    GroupedLinearProblem p = linear_in(recipe);
    LinearCase own(p, kCounts, 3, here());
    const test::Values want = y_of(own);
    p.options.quantized_w = true;
    std::vector<std::string_view> routes = {""};
    if (machine->device().sm == 90 && is_plain(p.recipe.fprop.lhs))
      routes = {"sm90_packed_rows", "decoded"};
    for (const std::string_view route : routes) {
      GivenLinear given(p, kCounts, 3, here(route));
      EXPECT_EQ(find_step<QuantizePlan>(given.plan, "quantize w"), nullptr);
      EXPECT_EQ(first_difference(y_of(given), want), "") << recipe << " " << route;
    }
  }
}

TEST_F(QuantizedWeights, OfAnMlpHaveTheBitsOfOneThatQuantises) {
  for (const char* recipe : kRecipes) {
    GroupedMlpProblem p = mlp_in(recipe);
    MlpCase own(p, kCounts, 4, here());
    const test::Values want = y_of(own);
    p.options.quantized_w = true;
    GivenMlp given(p, kCounts, 4, here());
    EXPECT_EQ(first_difference(y_of(given), want), "") << recipe;
  }
}

std::string before_problem(const std::string& what) { return what.substr(0, what.find(" [")); }

template <class Problem>
std::string refused(Problem p) {
  p.options.quantized_w = true;
  return before_problem(test::invalid([&] { plan(p, this_cpu()); }));
}

TEST(QuantizedWeightsErrors, OfProblems) {
  const std::string backwards =
      ": quantized_w is yes, must be no; backward is wanted, which reads weights along rows";
  GroupedLinearProblem p = linear_in("mxfp4");
  p.dgrad = true;
  EXPECT_EQ(refused(p), "grouped_linear" + backwards);
  p.dgrad = false, p.wgrad = true;
  EXPECT_EQ(refused(p), "grouped_linear" + backwards);
  p.wgrad = false;
  EXPECT_EQ(refused(linear_in("bf16")),
            "grouped_linear: quantized_w is yes, must be no; the recipe reads w as it is");
  p.options.cache_weights = true;
  EXPECT_EQ(refused(p), "grouped_linear: cache_weights is yes, must be no; w comes quantised");
  p.options.cache_weights = false, p.parameters.discrete_weight = true;
  EXPECT_EQ(refused(p),
            "grouped_linear: discrete_weight is yes, must be no; w comes as the codes and scales "
            "of all experts");
  GroupedMlpProblem mlp = mlp_in("mxfp4");
  mlp.dprob = true;
  EXPECT_EQ(refused(mlp), "grouped_mlp" + backwards);
  EXPECT_EQ(refused(parse_moe_problem("moe T=9 top_k=2 H=96 F=64 E=4 recipe=mxfp4")),
            "moe" + backwards);
}

TEST(QuantizedWeightsErrors, OfCodesThatDoNotFit) {
  const auto says = [](const char* recipe, auto change) {
    GroupedLinearProblem p = linear_in(recipe);
    p.options.quantized_w = true;
    GivenLinear c(p, kCounts, 3, {});
    GroupedLinearArgs args = c.args();
    change(args.parameters.quantized_w);
    const OwnedWorkspace w(c.plan.memory.forward_workspace_bytes);
    return before_problem(test::invalid([&] { forward(c.plan, args, w.get(), {}); }));
  };
  const std::string why = "; w comes quantised, in the format of the recipe";
  EXPECT_EQ(says("mxfp4", [](QuantizedView& w) { w = {}; }),
            "grouped_linear: quantized_w.codes is f32[], must be e2m1[4, 144, 96]" + why);
  EXPECT_EQ(says("mxfp8", [](QuantizedView& w) { w.scales.shape[2] = 1; }),
            "grouped_linear: quantized_w.scales is e8m0[4, 144, 1] strides (432, 3, 1), must be "
            "e8m0[4, 144, 3]" +
                why);
  EXPECT_EQ(says("fp8_tensor", [](QuantizedView& w) { w.expert_scale = nullptr; }),
            "grouped_linear: quantized_w.expert_scale is null, must point to 4 elements" + why);
}

}  // namespace
