#include "cadre/routing.h"

#include <gtest/gtest.h>

#include <numeric>

#include "tests/judge/close.h"
#include "tests/judge/errors.h"
#include "tests/judge/tensor.h"
#include "tests/judge/threads.h"
#include "tests/judge/workspace.h"

using namespace cadre;
using test::gamma;
using test::Tensor;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// One problem with its tensors. Logits are multiples of 1/8, so there are many ties and no near
/// ties that fp32 and double would break differently.
struct Case {
  RoutingProblem p;
  Tensor logits, bias, experts, prob, scores, dprob, dscores, dlogits;
  bool with_scores = true;

  Case(const RoutingProblem& problem, unsigned seed) : p(problem) {
    logits = Tensor(p.logits, {p.tokens, p.experts}, {.row_gap = 3});
    bias = Tensor(DType::kF32, {p.experts});
    dprob = Tensor(DType::kF32, {p.tokens, p.top_k});
    dscores = Tensor(DType::kF32, {p.tokens, p.experts});
    experts = Tensor(DType::kI32, {p.tokens, p.top_k});
    prob = Tensor(DType::kF32, {p.tokens, p.top_k});
    scores = Tensor(DType::kF32, {p.tokens, p.experts});
    dlogits = Tensor(p.logits, {p.tokens, p.experts}, {.row_gap = 5});
    std::mt19937 random(seed);
    for (int64_t t = 0; t < p.tokens; ++t)
      for (int64_t e = 0; e < p.experts; ++e) logits.set({t, e}, double(random() % 97) / 8.0 - 6);
    bias.fill(random, 0, 1);
    dprob.fill(random, -2, 2);
    dscores.fill(random, -2, 2);
  }
  int32_t* chosen(int64_t t) const { return experts.data<int32_t>() + t * p.top_k; }

  RoutingArgs args() {
    RoutingArgs given{.logits = logits.view(), .experts = experts.data<int32_t>()};
    if (p.backward) {
      given.dprob = dprob.data<float>();
      if (with_scores) given.dscores = dscores.data<float>();
      given.dlogits = dlogits.view();
    } else {
      if (p.expert_bias) given.expert_bias = bias.data<float>();
      given.prob = prob.data<float>();
      if (with_scores) given.scores = scores.data<float>();
    }
    return given;
  }
  void launch(std::string_view only) {
    const RoutingPlan made = plan(p, this_cpu(), only);
    EXPECT_EQ(made.name, only);
    const test::OwnedWorkspace workspace(made.workspace_bytes);
    run(made, args(), workspace.get(), {});
    EXPECT_EQ(experts.damage() + prob.damage() + scores.damage() + dlogits.damage(), "");
  }
  void both(std::string_view only) {
    p.backward = false;
    launch(only);
    p.backward = true;
    launch(only);
  }
  std::vector<char> outputs() const {
    std::vector<char> all;
    for (const Tensor* t : {&experts, &prob, &scores, &dlogits})
      all.insert(all.end(), t->bytes().begin(), t->bytes().end());
    return all;
  }
};

/// Roundings on the way of one probability: e^x and its argument (at most 12), the sum over the
/// experts, the sum over the chosen, and a few more.
int64_t operations(const RoutingProblem& p) { return 40 + p.experts / 64 + 2 * p.top_k; }

std::vector<double> relative_bound(const RoutingProblem& p, const std::vector<double>& values) {
  std::vector<double> bound;
  for (double value : values) bound.push_back(gamma(operations(p), std::abs(value)));
  return bound;
}

/// The bound of one token's dlogits: the formulas with every difference made a sum.
std::vector<double> gradient_bound(const Case& want, int64_t t) {
  const RoutingProblem& p = want.p;
  const int32_t* chosen = want.chosen(t);
  std::vector<double> q, dscore(size_t(p.experts)), bound(size_t(p.experts));
  double chosen_sum = 0, norm = p.normalize ? 1e-20 : 1, through_norm = 0, mean = 0,
         chosen_mean = 0;
  for (int j = 0; j < p.top_k; ++j) {
    const bool over_chosen = p.score == RoutingScore::kTopKSoftmax;
    q.push_back(over_chosen ? std::exp(want.logits.at(t, chosen[j]))
                            : want.scores.at(t, chosen[j]));
    chosen_sum += over_chosen ? q.back() : 0;
  }
  for (double& value : q) {
    if (chosen_sum > 0) value /= chosen_sum;
    if (p.normalize) norm += value;
  }
  for (int j = 0; j < p.top_k && p.normalize; ++j)
    through_norm += std::abs(want.dprob.at(t, j)) * q[size_t(j)] / norm;
  const auto dq = [&](int j) {
    return std::abs(p.scale) * (std::abs(want.dprob.at(t, j)) + through_norm) / norm;
  };
  for (int64_t e = 0; e < p.experts && want.with_scores; ++e)
    dscore[size_t(e)] = std::abs(want.dscores.at(t, e));
  for (int j = 0; j < p.top_k; ++j) chosen_mean += dq(j) * q[size_t(j)];
  for (int j = 0; j < p.top_k; ++j) {
    if (p.score == RoutingScore::kTopKSoftmax)
      bound[size_t(chosen[j])] += q[size_t(j)] * (dq(j) + chosen_mean);
    else
      dscore[size_t(chosen[j])] += dq(j);
  }
  const bool sigmoid = p.score == RoutingScore::kSigmoid;
  for (int64_t e = 0; e < p.experts; ++e) mean += dscore[size_t(e)] * want.scores.at(t, e);
  for (int64_t e = 0; e < p.experts; ++e) {
    const double s = want.scores.at(t, e);
    bound[size_t(e)] += s * (dscore[size_t(e)] + (sigmoid ? 0 : mean));
    bound[size_t(e)] = gamma(2 * operations(p), bound[size_t(e)]) +
                       2 * test::rounding(p.logits, want.dlogits.at(t, e));
  }
  return bound;
}

void check(const RoutingProblem& p, unsigned seed) {
  Case got(p, seed), want(p, seed);
  got.with_scores = want.with_scores = seed % 3 != 0;
  got.both("cpu");
  want.both("cpu_reference");
  EXPECT_EQ(got.experts.bytes(), want.experts.bytes()) << to_string(p);
  const std::vector<double> prob = want.prob.values();
  EXPECT_EQ(test::difference(got.prob.values(), prob, relative_bound(p, prob), p.top_k), "")
      << to_string(p);
  if (!want.with_scores) {
    EXPECT_TRUE(got.scores.untouched(0, p.tokens) && want.scores.untouched(0, p.tokens));
    want.with_scores = true;  // the bound takes the scores from a run that writes them
    want.p.backward = false;
    want.launch("cpu_reference");
    want.with_scores = false;
  } else {
    const std::vector<double> scores = want.scores.values();
    EXPECT_EQ(test::difference(got.scores.values(), scores, relative_bound(p, scores), p.experts),
              "")
        << to_string(p);
  }
  std::vector<double> bound;
  for (int64_t t = 0; t < p.tokens; ++t)
    for (double b : gradient_bound(want, t)) bound.push_back(b);
  EXPECT_EQ(test::difference(got.dlogits.values(), want.dlogits.values(), bound, p.experts), "")
      << to_string(p);
}

struct EveryScore : testing::TestWithParam<RoutingScore> {};

TEST_P(EveryScore, FastIsReferenceWithinTheBound) {
  constexpr DType kTypes[] = {DType::kF32, DType::kBf16, DType::kF16};
  struct Sizes {
    int experts, top_k, groups, group_top_k;
  };
  constexpr Sizes kSizes[] = {{1, 1, 1, 1},  {3, 2, 1, 1},   {8, 8, 1, 1},   {64, 8, 1, 1},
                              {64, 6, 8, 3}, {256, 8, 8, 4}, {384, 8, 1, 1}, {12, 2, 4, 3},
                              {6, 3, 6, 5},  {1024, 2, 1, 1}};
  unsigned seed = 1;
  for (const Sizes& sizes : kSizes)
    for (int64_t tokens : {0, 1, 70})
      for (bool normalize : {false, true})
        for (bool bias : {false, true})
          check({.score = GetParam(),
                 .tokens = sizes.experts > 300 ? tokens / 10 : tokens,
                 .experts = sizes.experts,
                 .top_k = sizes.top_k,
                 .logits = kTypes[seed % 3],
                 .normalize = normalize,
                 .scale = seed % 2 == 0 ? 2.5f : 1.0f,
                 .expert_bias = bias,
                 .groups = sizes.groups,
                 .group_top_k = sizes.group_top_k},
                seed++);
}

TEST_P(EveryScore, DoesNotDependOnTheThreads) {
  const RoutingProblem p{.score = GetParam(), .tokens = 150, .experts = 40, .top_k = 3};
  Case want(p, 3);
  {
    const test::Threads one(1);
    want.both("cpu");
  }
  for (int threads : {2, 3, 5}) {
    const test::Threads set(threads);
    Case got(p, 3);
    got.both("cpu");
    EXPECT_EQ(got.outputs(), want.outputs()) << threads;
  }
}

TEST_P(EveryScore, OfATokenDoesNotDependOnTheOthers) {
  const RoutingProblem p{.score = GetParam(), .tokens = 70, .experts = 40, .top_k = 3};
  Case before(p, 3), after(p, 3);
  std::mt19937 random(4);
  after.logits.fill(random, -6, 6, 1, 70);
  before.both("cpu");
  after.both("cpu");
  EXPECT_TRUE(std::equal(before.chosen(0), before.chosen(1), after.chosen(0)));
  for (int64_t e = 0; e < 40; ++e) {
    EXPECT_EQ(before.scores.at(0, e), after.scores.at(0, e));
    EXPECT_EQ(before.dlogits.at(0, e), after.dlogits.at(0, e));
  }
}

/// sum(dprob * prob) + sum(dscores * scores), by the reference.
double loss(const Case& c, const Tensor& logits) {
  Case probe = c;
  probe.logits = logits;
  probe.p.backward = false;
  probe.launch("cpu_reference");
  EXPECT_EQ(probe.experts.bytes(), c.experts.bytes()) << "the step changed the choice";
  double sum = 0;
  for (int64_t t = 0; t < c.p.tokens; ++t) {
    for (int64_t j = 0; j < c.p.top_k; ++j) sum += c.dprob.at(t, j) * probe.prob.at(t, j);
    for (int64_t e = 0; e < c.p.experts; ++e) sum += c.dscores.at(t, e) * probe.scores.at(t, e);
  }
  return sum;
}

TEST_P(EveryScore, BackwardIsTheLimitOfDifferences) {
  // Logits are 1/4 apart, so a step of 1/128 changes no choice; fp32 results limit the bound.
  const double step = 0x1p-7;
  for (bool normalize : {false, true}) {
    const RoutingProblem p{.score = GetParam(),
                           .tokens = 4,
                           .experts = 12,
                           .top_k = 4,
                           .normalize = normalize,
                           .scale = 1.5f,
                           .groups = 3,
                           .group_top_k = 2};
    Case c(p, 6);
    std::mt19937 random(8);
    std::vector<int> order(12);
    std::iota(order.begin(), order.end(), 0);
    for (int64_t t = 0; t < 4; ++t) {
      std::shuffle(order.begin(), order.end(), random);
      for (int64_t e = 0; e < 12; ++e) c.logits.set({t, e}, 0.25 * order[size_t(e)] - 1.5);
    }
    c.both("cpu");
    for (int64_t t = 0; t < 4; ++t)
      for (int64_t e = 0; e < 12; ++e) {
        Tensor above = c.logits, below = c.logits;
        above.set({t, e}, c.logits.at(t, e) + step);
        below.set({t, e}, c.logits.at(t, e) - step);
        EXPECT_NEAR(c.dlogits.at(t, e), (loss(c, above) - loss(c, below)) / (2 * step), 2e-4);
      }
  }
}

INSTANTIATE_TEST_SUITE_P(Routing, EveryScore,
                         testing::Values(RoutingScore::kSoftmax, RoutingScore::kTopKSoftmax,
                                         RoutingScore::kSigmoid));

struct EveryImplementation : testing::TestWithParam<const char*> {
  Case route(const RoutingProblem& p, const std::vector<float>& logits,
             const std::vector<float>& bias = {}) {
    Case c(p, 1);
    for (size_t e = 0; e < logits.size(); ++e) c.logits.set({0, int64_t(e)}, logits[e]);
    for (size_t e = 0; e < bias.size(); ++e) c.bias.set({int64_t(e)}, bias[e]);
    c.launch(GetParam());
    return c;
  }
  static std::vector<int32_t> chosen(const Case& c) {
    return {c.chosen(0), c.chosen(0) + c.p.top_k};
  }
};

TEST_P(EveryImplementation, BreaksTiesByLogitThenByNumber) {
  RoutingProblem p{.tokens = 1, .experts = 6, .top_k = 4};
  EXPECT_EQ(chosen(route(p, {0, 1, 0, 2, 1, 0})), (std::vector<int32_t>{3, 1, 4, 0}));
  // Far below the largest logit both probabilities are 0; the logits still decide.
  EXPECT_EQ(chosen(route(p, {-300, -200, -250, 0, -400, -201})),
            (std::vector<int32_t>{3, 1, 5, 2}));
  // Sigmoids of large logits are all 1.
  p.score = RoutingScore::kSigmoid;
  EXPECT_EQ(chosen(route(p, {60, 50, 80, 70, 40, 30})), (std::vector<int32_t>{2, 3, 0, 1}));
}

TEST_P(EveryImplementation, TakesNanForMinusInfinity) {
  for (RoutingScore score :
       {RoutingScore::kSoftmax, RoutingScore::kTopKSoftmax, RoutingScore::kSigmoid}) {
    const RoutingProblem p{.score = score, .tokens = 1, .experts = 4, .top_k = 3};
    Case c = route(p, {NAN, -2, -kInfinity, -1});
    EXPECT_EQ(chosen(c), (std::vector<int32_t>{3, 1, 0}));
    EXPECT_EQ(c.prob.at(0, 2), 0);
    EXPECT_GT(c.prob.at(0, 1), 0);
    c.p.backward = true;
    c.launch(GetParam());
    EXPECT_EQ(c.dlogits.at(0, 0), 0);
    EXPECT_EQ(c.dlogits.at(0, 2), 0);
    EXPECT_FALSE(std::isnan(c.dlogits.at(0, 1)));
  }
}

TEST_P(EveryImplementation, SharesAmongEqualInfinities) {
  const RoutingProblem p{.tokens = 1, .experts = 4, .top_k = 2};
  EXPECT_EQ(route(p, {0, kInfinity, 1, kInfinity}).prob.at(0, 1), 0.5);
  EXPECT_EQ(route(p, {NAN, NAN, NAN, NAN}).prob.at(0, 1), 0.25);
}

TEST_P(EveryImplementation, BiasChangesTheChoiceAndNotTheProbability) {
  const RoutingProblem p{
      .score = RoutingScore::kSigmoid, .tokens = 1, .experts = 3, .top_k = 1, .expert_bias = true};
  const Case c = route(p, {1, 0, -1}, {0, 0, 5});
  EXPECT_EQ(chosen(c), (std::vector<int32_t>{2}));
  EXPECT_NEAR(c.prob.at(0, 0), 1 / (1 + std::exp(1.0)), 1e-7);
  const Case masked = route(p, {1, 0, -1}, {-kInfinity, -kInfinity, -kInfinity});
  EXPECT_EQ(chosen(masked), (std::vector<int32_t>{0}));
}

TEST_P(EveryImplementation, LimitsTheChoiceToTheBestGroups) {
  RoutingProblem p{.score = RoutingScore::kTopKSoftmax,
                   .tokens = 1,
                   .experts = 8,
                   .top_k = 4,
                   .groups = 4,
                   .group_top_k = 2};
  // Groups sum their top 2: 5, 6, 5.5, 3. The 5 of group 0 may not be chosen.
  EXPECT_EQ(chosen(route(p, {5, 0, 3, 3, 2.5, 3, 1, 2})), (std::vector<int32_t>{2, 3, 5, 4}));
  // Of equal groups the lower number is kept.
  EXPECT_EQ(chosen(route(p, {1, 1, 1, 1, 1, 1, 1, 1})), (std::vector<int32_t>{0, 1, 2, 3}));
  p.top_k = 1;  // the top 1 / 2 of a group is its best
  EXPECT_EQ(chosen(route(p, {5, 0, 3, 3, 2.5, 3, 1, 2})), (std::vector<int32_t>{0}));
}

TEST_P(EveryImplementation, NormalizesAndScales) {
  const RoutingProblem p{.score = RoutingScore::kSigmoid,
                         .tokens = 1,
                         .experts = 3,
                         .top_k = 2,
                         .normalize = true,
                         .scale = 2.5f};
  const Case c = route(p, {0, 0, -1});
  EXPECT_NEAR(c.prob.at(0, 0), 1.25, 1e-6);
  EXPECT_NEAR(c.prob.at(0, 1), 1.25, 1e-6);
  const Case none = route(p, {-kInfinity, -kInfinity, -kInfinity});
  EXPECT_EQ(none.prob.at(0, 0), 0);
}

TEST_P(EveryImplementation, BackwardSkipsWhatIsNoExpert) {
  for (RoutingScore score :
       {RoutingScore::kSoftmax, RoutingScore::kTopKSoftmax, RoutingScore::kSigmoid}) {
    Case c({.backward = true, .score = score, .tokens = 5, .experts = 3, .top_k = 2}, 4);
    c.with_scores = false;
    for (int64_t i = 0; i < 10; ++i) c.chosen(0)[i] = i % 2 == 0 ? -1 : 3;
    c.launch(GetParam());
    for (double value : c.dlogits.values()) EXPECT_EQ(value, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Routing, EveryImplementation, testing::Values("cpu", "cpu_reference"));

TEST(RoutingProblem, PrintsAndParsesBack) {
  RoutingProblem p{
      .tokens = 4096, .experts = 64, .top_k = 8, .logits = DType::kBf16, .normalize = true};
  EXPECT_EQ(to_string(p), "routing forward softmax T=4096 E=64 top_k=8 logits=bf16 normalize=yes");
  EXPECT_EQ(parse_routing_problem(to_string(p)), p);
  p = {.backward = true,
       .score = RoutingScore::kSigmoid,
       .tokens = 1,
       .experts = 256,
       .top_k = 8,
       .scale = 2.5f,
       .expert_bias = true,
       .groups = 8,
       .group_top_k = 4};
  EXPECT_EQ(to_string(p),
            "routing backward sigmoid T=1 E=256 top_k=8 logits=f32 scale=2.5 expert_bias=yes "
            "groups=8 group_top_k=4");
  EXPECT_EQ(parse_routing_problem(to_string(p)), p);
  p = {.tokens = 1, .experts = 8, .top_k = 2, .map = true};
  EXPECT_EQ(to_string(p), "routing forward softmax T=1 E=8 top_k=2 logits=f32 map=yes");
  EXPECT_EQ(parse_routing_problem(to_string(p)), p);
  p.row_prob = true;
  EXPECT_EQ(to_string(p),
            "routing forward softmax T=1 E=8 top_k=2 logits=f32 map=yes row_prob=yes");
  EXPECT_EQ(parse_routing_problem(to_string(p)), p);
}

std::string head(const std::string& message) { return message.substr(0, message.rfind(" [")); }

std::string plan_error(std::string_view words) {
  return head(test::invalid([&] { plan(parse_routing_problem(words), this_cpu()); }));
}

TEST(RoutingErrors, OfProblems) {
  EXPECT_EQ(plan_error("routing forward softmax E=0"), "routing: E is 0, must be 1 or more");
  EXPECT_EQ(plan_error("routing forward softmax top_k=0"),
            "routing: top_k is 0, must be 1 or more");
  EXPECT_EQ(plan_error("routing forward softmax E=3 top_k=4"),
            "routing: top_k is 4, must be at most E, 3");
  EXPECT_EQ(plan_error("routing forward softmax T=2147483648"),
            "routing: T is 2147483648, must be below 2^31; rows are numbered in int32");
  EXPECT_EQ(plan_error("routing forward softmax T=1073741824 E=2 top_k=2"),
            "routing: T * top_k is 2147483648, must be below 2^31; rows are numbered in int32");
  EXPECT_EQ(plan_error("routing forward softmax logits=i64"),
            "routing: logits is i64, must be f32, bf16 or f16");
  EXPECT_EQ(plan_error("routing forward softmax groups=0"),
            "routing: groups is 0, must be 1 or more");
  EXPECT_EQ(plan_error("routing forward softmax E=4 groups=3"),
            "routing: groups is 3, must divide E, 4; groups are equal");
  EXPECT_EQ(plan_error("routing forward softmax E=4 groups=2 group_top_k=0"),
            "routing: group_top_k is 0, must be 1 or more");
  EXPECT_EQ(plan_error("routing forward softmax E=4 groups=2 group_top_k=3"),
            "routing: group_top_k is 3, must be at most groups, 2");
  EXPECT_EQ(plan_error("routing forward softmax E=8 top_k=5 groups=4 group_top_k=2"),
            "routing: top_k is 5, must be at most 4; that many experts are in group_top_k groups");
  EXPECT_EQ(plan_error("routing backward softmax map=yes"),
            "routing: map is yes, must be no; only forward chooses");
  for (const char* pass : {"forward", "backward"})
    EXPECT_EQ(plan_error(text("routing ", pass, " softmax row_prob=yes")),
              "routing: row_prob is yes, must be no; the problem says map=no");
  EXPECT_EQ(plan_error("routing forward hash"),
            "problem: score is 'hash', must be one of softmax, topk_softmax, sigmoid");
  EXPECT_EQ(head(test::invalid([] { plan(RoutingProblem{.tokens = -1}, this_cpu()); })),
            "routing: T is -1, must be 0 or more");
  EXPECT_EQ(head(test::invalid([] { plan(RoutingProblem{.scale = kInfinity}, this_cpu()); })),
            "routing: scale is inf, must be finite");
}

/// The error of running a small problem after `spoil` changed its arguments.
template <class Spoil>
std::string error(RoutingProblem p, Spoil&& spoil) {
  p.tokens = 3, p.experts = 4, p.top_k = 2;
  Case c(p, 1);
  RoutingArgs args = c.args();
  spoil(args, c);
  const RoutingPlan made = plan(p, this_cpu());
  const test::OwnedWorkspace workspace(made.workspace_bytes);
  return head(test::invalid([&] { run(made, args, workspace.get(), {}); }));
}

TEST(RoutingErrors, OfForward) {
  EXPECT_EQ(error({}, [](RoutingArgs& a, Case& c) { a.logits = c.prob.view(); }),
            "routing: logits is f32[3, 2], must be f32[3, 4]");
  EXPECT_EQ(error({}, [](RoutingArgs& a, Case&) { a.experts = nullptr; }),
            "routing: experts is null, must point to 6 elements");
  EXPECT_EQ(error({}, [](RoutingArgs& a, Case&) { a.prob = nullptr; }),
            "routing: prob is null, must point to 6 elements");
  EXPECT_EQ(error({.expert_bias = true}, [](RoutingArgs& a, Case&) { a.expert_bias = nullptr; }),
            "routing: expert_bias is null, must point to 4 elements; the problem says "
            "expert_bias=yes");
  EXPECT_EQ(error({}, [](RoutingArgs& a, Case& c) { a.expert_bias = c.bias.data<float>(); }),
            "routing: expert_bias is given, must be null; the problem says expert_bias=no");
  EXPECT_EQ(error({}, [](RoutingArgs& a, Case& c) { a.dprob = c.dprob.data<float>(); }),
            "routing: dprob is given, must be null; only backward reads it");
  EXPECT_EQ(error({}, [](RoutingArgs& a, Case& c) { a.dscores = c.dscores.data<float>(); }),
            "routing: dscores is given, must be null; only backward reads it");
  EXPECT_EQ(error({}, [](RoutingArgs& a, Case& c) { a.dlogits = c.dlogits.view(); }),
            "routing: dlogits is given, must be null; only backward writes it");
}

TEST(RoutingErrors, OfBackward) {
  const RoutingProblem backward{.backward = true};
  EXPECT_EQ(error(backward, [](RoutingArgs& a, Case&) { a.experts = nullptr; }),
            "routing: experts is null, must point to 6 elements; forward chose them");
  EXPECT_EQ(error(backward, [](RoutingArgs& a, Case&) { a.dprob = nullptr; }),
            "routing: dprob is null, must point to 6 elements");
  EXPECT_EQ(error(backward, [](RoutingArgs& a, Case& c) { a.dlogits = c.prob.view(); }),
            "routing: dlogits is f32[3, 2], must be f32[3, 4]");
  EXPECT_EQ(error(backward, [](RoutingArgs& a, Case& c) { a.expert_bias = c.bias.data<float>(); }),
            "routing: expert_bias is given, must be null; the bias has no gradient");
  EXPECT_EQ(error(backward, [](RoutingArgs& a, Case& c) { a.prob = c.prob.data<float>(); }),
            "routing: prob is given, must be null; only forward writes it");
  EXPECT_EQ(error(backward, [](RoutingArgs& a, Case& c) { a.scores = c.scores.data<float>(); }),
            "routing: scores is given, must be null; only forward writes it");
}

TEST(RoutingErrors, OfWorkspaces) {
  const RoutingProblem p{.tokens = 3, .experts = 4, .top_k = 2};
  Case c(p, 1);
  const RoutingPlan made = plan(p, this_cpu());
  const test::OwnedWorkspace workspace(made.workspace_bytes);
  ASSERT_GT(made.workspace_bytes, 0);
  Workspace small = workspace.get(), shifted = workspace.get();
  small.bytes -= 1;
  shifted.data = static_cast<char*>(shifted.data) + 16;
  EXPECT_EQ(head(test::invalid([&] { run(made, c.args(), small, {}); })),
            text("run: workspace is ", small.bytes, " bytes, must be ", made.workspace_bytes,
                 " or more"));
  EXPECT_EQ(head(test::invalid([&] { run(made, c.args(), shifted, {}); })),
            text("run: workspace is at ", shifted.data, ", must be 256-byte aligned and not null"));
}

}  // namespace
