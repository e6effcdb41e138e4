// An expert MLP whose activation writes the codes that fc2 reads of h, and fc1's dgrad of dz: the
// bits of the layer that quantises both by themselves, on a machine.
#include <gtest/gtest.h>

#include "tests/judge/errors.h"
#include "tests/judge/on_machine.h"
#include "tests/layers/layer_copy.h"
#include "tests/layers/linear_case.h"
#include "tests/layers/mlp_case.h"

using namespace cadre;
using test::Counts;
using test::first_difference;
using test::LayerCopy;
using test::LinearCase;
using test::MadeFor;
using test::MlpCase;
using test::MlpResult;
using test::unsupported;

namespace {

constexpr int64_t kStep = 16;  // elements between rows, so that TMA takes them

const Counts kCounts{.rows = 75, .of = {17, 0, 33, 20}};

struct MlpCodes : test::OnMachine {
  MadeFor by(std::string_view route) const { return {machine->device(), kStep, {}, route}; }
  bool on_gpu() const { return machine->device().kind == DeviceKind::kCuda; }

  template <class Case>
  void step(Case& c, bool by_queue) {
    LayerCopy copy(*machine, c);
    machine->run([&](Stream stream) { copy.step(stream, by_queue); });
    copy.memory.fetch();
    EXPECT_EQ(copy.memory.damage() + c.damage(), "") << to_string(c.p());
  }
  void expect_equal(const GroupedMlpProblem& p, unsigned seed, bool show = false) {
    MlpCase got(p, kCounts, seed, by("codes")), want(p, kCounts, seed, by("unfused"));
    got.shows_inside = want.shows_inside = show;
    step(got, seed % 2);
    step(want, seed % 2);
    EXPECT_EQ(first_difference(MlpResult(got), MlpResult(want)), "") << to_string(p);
  }
};

GroupedMlpProblem mlp(std::string_view recipe) {
  GroupedMlpProblem p{.rows = 75, .hidden = 128, .features = 256, .experts = 4};
  p.recipe = parse_recipe(recipe);
  p.prob = p.bias1 = p.bias2 = p.bias2_scale = true;
  return p;
}

/// Changes of a problem, each by itself.
const std::function<void(GroupedMlpProblem&)> kChanges[] = {
    [](auto&) {},
    [](auto& p) { p.keep_h = true; },
    [](auto& p) { p.bias1 = p.prob = false; },
    [](auto& p) { p.bias1 = p.wgrad1 = false; },
    [](auto& p) { p.wgrad2 = p.dprob = false; },
    [](auto& p) { p.dgrad = p.wgrad1 = p.wgrad2 = p.dbias = p.dprob = false; },
    [](auto& p) { p.options.deferred = true; },
    [](auto& p) { p.options.overwrite_saved = p.keep_h = true; },
    [](auto& p) { p.options.cache_weights = p.options.save_input = true; },
    [](auto& p) { p.options.tail = Tail::kZero, p.options.amax_eps = 0.23f; },
    [](auto& p) { p.layout = GluLayout::kInterleave1; },
    [](auto& p) { p.layout = GluLayout::kInterleave32, p.keep_h = true; },
    [](auto& p) { p.activation = ActivationKind::kReluSquared; },
};

TEST_F(MlpCodes, HaveTheBitsOfTwoOperations) {
  unsigned seed = 1;
  for (const auto& change : kChanges) {
    GroupedMlpProblem p = mlp("fp8_block,wgrad=bf16");
    change(p);
    expect_equal(p, seed, seed % 3 == 0);
    ++seed;
  }
}

TEST_F(MlpCodes, OfOnePassAlone) {
  expect_equal(mlp("fp8_block,wgrad=bf16,dgrad=bf16"), 1);
  expect_equal(mlp("fp8_block,wgrad=bf16,fprop=bf16"), 2);
  // What is read along rows too is one copy more of a quantise that stays.
  expect_equal(mlp("fp8_block,wgrad=bf16*fp8_block"), 3);
  expect_equal(mlp("fp8_block,wgrad=fp8_block*bf16"), 4);
  expect_equal(mlp("fp8_block"), 6);
}

/// On the CPU products take any codes; on a GPU those of these formats are decoded.
TEST_F(MlpCodes, OfOtherFormats) {
  for (const char* recipe : {"mxfp8,wgrad=bf16", "bf16,fprop=mxfp4*mxfp4",
                             "bf16,fprop=mxfp8:e5m2*mxfp8,dgrad=fp8_block:e5m2+fp32*fp8_block"}) {
    if (!on_gpu()) {
      expect_equal(mlp(recipe), 5);
      continue;
    }
    EXPECT_NE(unsupported([&] { plan(mlp(recipe), machine->device(), "codes"); })
                  .find("codes: no product reads h or dz in codes along K alone that an activation "
                        "writes"),
              std::string::npos)
        << recipe;
  }
}

TEST_F(MlpCodes, AreNotOfRecipesWithoutThem) {
  for (const char* recipe : {"bf16", "fp8_block", "fp8_tensor,wgrad=bf16", "nvfp4,wgrad=bf16"}) {
    GroupedMlpProblem p = mlp(recipe);
    p.keep_h = true;  // else only backward reads it along rows
    EXPECT_NE(unsupported([&] { plan(p, machine->device(), "codes"); })
                  .find("codes: no product reads h or dz in codes along K alone that an activation "
                        "writes"),
              std::string::npos)
        << recipe;
  }
}

TEST_F(MlpCodes, AreQuantisedOnce) {
  GroupedMlpProblem p = mlp("fp8_block,wgrad=bf16");
  p.bias1 = false;
  const GroupedMlpPlan made = plan(p, machine->device(), "codes");
  EXPECT_EQ(find_step<QuantizePlan>(made.fc2, "quantize x"), nullptr);
  EXPECT_EQ(find_step<QuantizePlan>(made.fc1, "quantize dy"), nullptr);
  EXPECT_NE(find_step<QuantizePlan>(made.fc1, "quantize x"), nullptr);
  EXPECT_NE(find_step<QuantizePlan>(made.fc2, "quantize dy"), nullptr);
  EXPECT_FALSE(find_step<ActivationPlan>(made, "activation")->problem.plain);
  EXPECT_TRUE(find_step<ActivationPlan>(made, "activation backward")->problem.plain);
  EXPECT_EQ(find_tensor(made, "h"), nullptr);
  EXPECT_NE(find_tensor(made, "dz"), nullptr);
  EXPECT_EQ(find_tensor(made, "h along K")->shape.scales_major,
            on_gpu() ? Major::kColumn : Major::kRow);
  EXPECT_NE(explain(made).find("along_k=fp8_block"), std::string::npos);
  EXPECT_NE(explain(made).find("    z, prob -> h along K\n"), std::string::npos);
  p.keep_h = true;
  p.wgrad1 = false;
  const GroupedMlpPlan other = plan(p, machine->device(), "codes");
  EXPECT_TRUE(find_step<ActivationPlan>(other, "activation")->problem.plain);
  EXPECT_FALSE(find_step<ActivationPlan>(other, "activation backward")->problem.plain);
}

/// An MLP whose x has come with its codes, as its plan orders them: from other ranks, say.
struct GivenCodesCase : MlpCase {
  test::OwnedWorkspace bytes;
  QuantizedView codes;

  GivenCodesCase(const GroupedMlpProblem& p, unsigned seed, const MadeFor& where)
      : MlpCase(p, kCounts, seed, where), bytes(quantized_bytes(shape())) {
    codes = quantized_view(shape(), bytes.get().data);
    QuantizeProblem q{.kind = RowsKind::kRagged, .rows = p.rows, .cols = p.hidden};
    q.experts = p.experts;
    q.source = p.dtype;
    q.along_k = shape().format;
    q.along_k_scales_major = shape().scales_major;
    const QuantizePlan made = cadre::plan(q, this_cpu());
    const test::OwnedWorkspace w(made.workspace_bytes);
    run(made, {.source = x.view(), .offsets = {offsets.data(), p.experts}, .along_k = codes},
        w.get(), {});
  }
  const QuantizedShape& shape() const { return find_tensor(plan.fc1, "x along K")->shape; }
  GroupedMlpArgs args() {
    GroupedMlpArgs a = MlpCase::args();
    a.x_along_k = codes;
    if (!p().wgrad1) a.x = {};
    return a;
  }
  template <class Visit>
  void for_pieces(Visit&& visit) const {
    MlpCase::for_pieces(visit);
    test::Piece piece = test::piece("x as codes", bytes);
    piece.holds = test::Holds::kInput;
    visit(piece);
  }
};

TEST_F(MlpCodes, OfXThatCameWithThem) {
  unsigned seed = 1;
  for (const char* recipe : {"fp8_block", "fp8_block,wgrad=bf16", "mxfp8,wgrad=bf16"})
    for (const bool learns : {true, false}) {
      GroupedMlpProblem p = mlp(recipe);
      if (!learns) p.dgrad = p.wgrad1 = p.wgrad2 = p.dbias = p.dprob = false;
      MlpCase want(p, kCounts, ++seed, by(""));
      p.given_x_along_k = true;
      GivenCodesCase got(p, seed, by(""));
      EXPECT_EQ(find_step<QuantizePlan>(got.plan.fc1, "quantize x") != nullptr,
                learns && recipe == std::string_view("fp8_block"));
      step(got, false);
      step(want, false);
      EXPECT_EQ(first_difference(MlpResult(got), MlpResult(want)), "") << to_string(p);
    }
}

/// A linear whose codes come as its plan orders them.
TEST(GivenAlongK, MustFit) {
  GroupedLinearProblem p{.rows = 20, .n = 24, .k = 16, .experts = 3};
  const auto error = [&](std::string_view recipe) {
    p.recipe = parse_recipe(recipe);
    const std::string why = test::invalid([&] { plan(p, this_cpu()); });
    return why.substr(0, why.find(" [grouped_linear "));
  };
  p.given_x_along_k = true;
  EXPECT_EQ(error("bf16"),
            "grouped_linear: given_x_along_k is yes, must be no; the recipe reads x as it is");
  p.options.quantized_x = true;
  EXPECT_EQ(error("mxfp8"),
            "grouped_linear: given_x_along_k is yes, must be no; quantized_x or "
            "gather says how x comes");
  p.options.quantized_x = p.given_x_along_k = false;
  p.given_dy_along_k = true;
  EXPECT_EQ(error("bf16"),
            "grouped_linear: given_dy_along_k is yes, must be no; no product reads "
            "codes of dy along K");
  p.given_x_along_k = true;
  p.recipe = parse_recipe("mxfp8,wgrad=bf16");
  EXPECT_EQ(parse_grouped_linear_problem(to_string(p)), p);

  LinearCase c(p, {.rows = 20, .of = {7, 0, 11}}, 1);
  const auto why = [&](const auto& phase) {
    const std::string all = test::invalid([&] { phase(c); });
    return all.substr(0, all.find(" [grouped_linear "));
  };
  EXPECT_EQ(why([](LinearCase& of) { of.forward(); }),
            "grouped_linear: x_along_k.codes is f32[], must be e4m3[20, 16]; x comes quantised, in "
            "the format of the recipe");
  EXPECT_EQ(why([](LinearCase& of) { of.backward(); }),
            "grouped_linear: dy_along_k.codes is f32[], must be e4m3[20, 24]; its codes along K "
            "come with dy, in the format of the recipe");
}

}  // namespace
