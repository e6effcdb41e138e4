// The expert MLP: its gradients against differences, its stages within their bounds, and equal bits
// however it runs.
#include "cadre/grouped_mlp.h"

#include <gtest/gtest.h>

#include "tests/layers/mlp_case.h"
#include "tests/layers/mlp_check.h"
#include "tests/layers/mlp_composition.h"
#include "tests/layers/random_layers.h"

using namespace cadre;
using test::Counts;
using test::first_difference;
using test::MlpCase;
using test::MlpResult;
using test::Values;

namespace {

constexpr GluLayout kLayouts[] = {GluLayout::kConcat, GluLayout::kInterleave1,
                                  GluLayout::kInterleave32};

GroupedMlpProblem problem(const Counts& counts, std::string_view recipe) {
  GroupedMlpProblem p{.rows = counts.rows, .hidden = 10, .features = 32};
  p.experts = counts.experts();
  p.recipe = parse_recipe(recipe);
  p.prob = p.bias1 = p.bias2 = p.bias2_scale = true;
  return p;
}

/// The whole model in double, as one function of everything that has a gradient.
struct Model {
  test::MlpSizes sizes;
  Values x, prob, w1, b1, w2, b2, scale, dy;
  Values none{};

  Model(const GroupedMlpProblem& p, const std::vector<int32_t>& offsets, unsigned seed)
      : sizes{p, offsets} {
    std::mt19937 random(seed);
    const auto draw = [&](int64_t count, double low, double high) {
      std::uniform_real_distribution<double> uniform(low, high);
      Values all;
      for (int64_t i = 0; i < count; ++i) all.push_back(uniform(random));
      return all;
    };
    const int64_t rows = sizes.rows(), z = sizes.z_columns();
    x = draw(rows * p.hidden, -1, 1);
    prob = draw(rows, 0.2, 1);
    w1 = draw(p.experts * z * p.hidden, -1, 1);
    b1 = draw(p.experts * z, -1, 1);
    w2 = draw(p.experts * p.hidden * p.features, -1, 1);
    b2 = draw(p.experts * p.hidden, -1, 1);
    scale = draw(rows, 0.2, 1);
    dy = draw(rows * p.hidden, -1, 1);
  }
  test::LinearStage one() const { return {sizes, sizes.z_columns(), sizes.p.hidden, w1, b1, none}; }
  test::LinearStage two() const { return {sizes, sizes.p.hidden, sizes.p.features, w2, b2, scale}; }
  test::ActivationStage activation() const { return {sizes, prob}; }
  Values z() const { return values(one().out(x)); }
  Values h() const { return activation().h(z(), DType::kF32).value; }

  /// <dy, y>: its gradients are those of the layer.
  double loss() const {
    const Values y = values(two().out(h()));
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i) sum += dy[i] * y[i];
    return sum;
  }

  /// The difference quotient of one input, and how far it may be from the derivative: as far as the
  /// quotient of twice the step is from it, and what the doubles lose.
  void expect_gradient(const char* what, Values Model::*input, const Values& gradient) {
    Values& values = this->*input;
    for (size_t i = 0; i < values.size(); i += 1 + values.size() / 40) {
      const double at = values[i], step = 1e-5;
      const auto loss_at = [&](double v) {
        values[i] = v;
        const double l = loss();
        values[i] = at;
        return l;
      };
      const double near = (loss_at(at + step) - loss_at(at - step)) / (2 * step);
      const double far = (loss_at(at + 2 * step) - loss_at(at - 2 * step)) / (4 * step);
      const double bound = std::abs(far - near) + 1e-13 / step * (1 + std::abs(loss()));
      EXPECT_NEAR(gradient[i], near, bound) << what << "[" << i << "] of " << to_string(sizes.p);
    }
  }
};

TEST(MlpModel, ItsGradientsAreDifferenceQuotients) {
  unsigned seed = 0;
  for (const ActivationInfo& row : activation_list()) {
    const Counts counts{.rows = 6, .of = {2, 0, 4}};
    GroupedMlpProblem p = problem(counts, "f32");
    p.hidden = 3;
    p.features = row.gated && seed % 3 == 2 ? 32 : 5;
    p.activation = row.kind;
    p.constants = row.kind == ActivationKind::kClampedSwiGlu
                      ? ActivationConstants{1.5f, 1.25f, 0.5f}
                      : ActivationConstants();
    if (row.gated) p.layout = kLayouts[seed % 3];
    Model m(p, counts.offsets(), ++seed);
    const Values dh = values(m.two().dx(m.dy));
    const auto back = m.activation().backward(m.z(), dh, DType::kF32);
    m.expect_gradient("dx", &Model::x, values(m.one().dx(back.dz)));
    m.expect_gradient("dprob", &Model::prob, values(back.dprob));
    m.expect_gradient("dw1", &Model::w1, values(m.one().dw(back.dz, m.x)));
    m.expect_gradient("dbias1", &Model::b1, values(m.one().dbias(back.dz)));
    m.expect_gradient("dw2", &Model::w2, values(m.two().dw(m.dy, m.h())));
    m.expect_gradient("dbias2", &Model::b2, values(m.two().dbias(m.dy)));
    m.expect_gradient("dbias2_scale", &Model::scale, values(m.two().dscale(m.dy)));
  }
}

TEST(GroupedMlp, PlainRecipesAreTheModelWithinTheBound) {
  unsigned seed = 0;
  test::for_random_counts(140, 1, [&](const Counts& counts) {
    if (counts.rows > 60 || counts.experts() > 64) return;
    const GroupedMlpProblem p = test::plain_mlp(counts, ++seed);
    const MlpCase before(p, counts, seed);
    MlpCase after(p, counts, seed);
    after.shows_inside = true;
    after.step();
    test::MlpCheck(before, after).check();
  });
}

const char* const kRecipes[] = {"f32",
                                "bf16",
                                "f16",
                                "fp8_tensor",
                                "fp8_block",
                                "mxfp8",
                                "nvfp4",
                                "mxfp4",
                                "nvfp4,wgrad=bf16",
                                "bf16,wgrad=mxfp8",
                                "mxfp8,dgrad=fp8_block"};

TEST(GroupedMlp, EveryRecipeIsItsLayersBitForBit) {
  unsigned seed = 0;
  for (const char* recipe : kRecipes)
    for (const Counts& counts :
         {Counts{.rows = 90, .of = {33, 0, 40, 1}}, Counts{.rows = 20, .of = {0, 20}},
          Counts{.rows = 0, .of = {0, 0, 0}}, Counts{.rows = 5, .of = {0}}}) {
      GroupedMlpProblem p = problem(counts, recipe);
      p.options.accumulate = Accumulate(++seed % 4);
      p.options.accumulate_bias = Accumulate(seed / 4 % 4);
      p.parameters.dw = DType::kF32;
      p.activation = ActivationKind(seed % 10);
      p.options.amax_eps = seed % 3 ? 0 : 0.125f;
      MlpCase want(p, counts, seed), got(p, counts, seed);
      test::MlpComposition(want).run();
      got.step();
      EXPECT_EQ(first_difference(MlpResult(got), MlpResult(want)), "") << to_string(p);
      EXPECT_EQ(got.damage(), "") << to_string(p);
    }
}

struct Variant {
  const char* name;
  void (*change)(GroupedMlpProblem&);
};
const Variant kVariants[] = {
    {"keep_h", [](GroupedMlpProblem& p) { p.keep_h = true; }},
    {"deferred", [](GroupedMlpProblem& p) { p.options.deferred = true; }},
    {"deferred keep_h", [](GroupedMlpProblem& p) { p.options.deferred = p.keep_h = true; }},
    {"cache_weights", [](GroupedMlpProblem& p) { p.options.cache_weights = true; }},
    {"overwrite_saved", [](GroupedMlpProblem& p) { p.options.overwrite_saved = true; }},
    {"overwrite_saved deferred",
     [](GroupedMlpProblem& p) { p.options.overwrite_saved = p.options.deferred = true; }},
    {"save_input", [](GroupedMlpProblem& p) { p.options.save_input = true; }},
    {"discrete",
     [](GroupedMlpProblem& p) {
       p.parameters.discrete_weight = p.parameters.discrete_dw = true;
       p.parameters.discrete_bias = true;
     }},
    {"all of it", [](GroupedMlpProblem& p) {
       p.options.deferred = p.options.cache_weights = p.options.save_input = true;
       p.parameters.discrete_weight = p.parameters.discrete_dw = true;
     }}};

TEST(GroupedMlp, HowItRunsChangesNoBit) {
  unsigned seed = 0;
  for (const char* recipe : kRecipes) {
    const Counts counts{.rows = 75, .of = {17, 0, 33, 20}};
    GroupedMlpProblem p = problem(counts, recipe);
    // Added up, dw of fc1 is lent to nobody; written, it is.
    p.options.accumulate = seed % 2 == 0 ? Accumulate::kDevice : Accumulate::kNo;
    p.options.accumulate_bias = Accumulate::kPerExpert;
    MlpCase want(p, counts, ++seed);
    want.step();
    for (const Variant& variant : kVariants) {
      GroupedMlpProblem other = p;
      variant.change(other);
      MlpCase got(other, counts, seed);
      got.step();
      EXPECT_EQ(first_difference(MlpResult(got), MlpResult(want)), "")
          << variant.name << " of " << to_string(p);
    }
    for (const bool overwrites : {false, true}) {
      p.options.overwrite_saved = overwrites;
      MlpCase inside(p, counts, seed);
      inside.shows_inside = true;
      inside.step();
      EXPECT_EQ(first_difference(MlpResult(inside), MlpResult(want)), "") << to_string(p);
    }
  }
}

TEST(GroupedMlp, TheQueueRunsBothWeightGradients) {
  for (const char* recipe : {"bf16", "mxfp8"}) {
    const Counts counts{.rows = 30, .of = {11, 0, 17}};
    GroupedMlpProblem p = problem(counts, recipe);
    MlpCase want(p, counts, 3);
    want.step();
    p.options.deferred = true;
    WgradQueue queue(2);
    MlpCase got(p, counts, 3);
    got.queue = &queue;
    got.forward();
    got.backward();
    ASSERT_EQ(queue.pending(), 2);
    EXPECT_EQ(queue.front().plan, &got.plan.fc2);
    EXPECT_TRUE(got.fc1.dw.untouched() && got.fc2.dw.untouched());
    EXPECT_FALSE(got.fc1.dbias.untouched() || got.fc2.dbias.untouched());
    const test::OwnedWorkspace w(got.plan.memory.wgrad_workspace_bytes);
    queue.run_next(0, w.get(), {});
    EXPECT_TRUE(got.fc1.dw.untouched());
    queue.run_next(0, w.get(), {});
    EXPECT_EQ(first_difference(MlpResult(got), MlpResult(want)), "") << recipe;
  }
}

TEST(GroupedMlp, FollowsTheCountsAndTheWeightsFromStepToStep) {
  const Counts first{.rows = 60, .of = {10, 20, 0, 25}}, second{.rows = 60, .of = {0, 3, 40, 2}};
  for (const char* recipe : {"bf16", "nvfp4"}) {
    GroupedMlpProblem p = problem(first, recipe);
    p.options.cache_weights = true;
    MlpCase replayed(p, first, 5), fresh(p, second, 6);
    replayed.step();
    fresh.step();
    replayed.counts = second;
    replayed.offsets = fresh.offsets;
    for (test::Tensor MlpCase::*t :
         {&MlpCase::x, &MlpCase::dy, &MlpCase::prob, &MlpCase::bias2_scale})
      replayed.*t = fresh.*t;
    MlpCase untouched(p, second, 6);
    std::swap(replayed.fc1, untouched.fc1);
    std::swap(replayed.fc2, untouched.fc2);
    replayed.clear();
    replayed.step();
    EXPECT_EQ(first_difference(MlpResult(replayed), MlpResult(fresh)), "") << recipe;
  }
}

/// What is frozen changes nothing of the rest, and is not written.
TEST(GroupedMlp, FrozenPartsAreNotTouchedAndChangeNothing) {
  const Counts counts{.rows = 30, .of = {11, 0, 17}};
  for (const char* recipe : {"bf16", "mxfp8", "fp8_tensor"}) {
    GroupedMlpProblem p = problem(counts, recipe);
    MlpCase all(p, counts, 9);
    all.step();
    for (unsigned mask = 0; mask < 64; mask += recipe == std::string("mxfp8") ? 1 : 5) {
      p.dgrad = mask & 1;
      p.wgrad1 = mask & 2;
      p.wgrad2 = mask & 4;
      p.dbias = mask & 8;
      p.dprob = mask & 16;
      p.keep_h = mask & 32;
      MlpCase some(p, counts, 9);
      some.step();
      const MlpResult got(some), want(all);
      const bool wanted[] = {true, p.dgrad, p.dprob, p.dbias, p.wgrad1, p.wgrad2, p.dbias, p.dbias};
      for (size_t i = 0; i < got.parts.size(); ++i) {
        const auto& [name, values] = got.parts[i];
        const Values poison(values.size(), std::nan(""));
        EXPECT_EQ(first_difference(values, wanted[i] ? want.parts[i].second : poison), "")
            << name << " of " << to_string(p);
      }
    }
  }
}

}  // namespace
