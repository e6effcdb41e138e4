// Routing on the GPU has the bits of the CPU's `cpu`, which tests/ops hold against the reference;
// the chosen experts are those of the reference.
#include "cadre/routing.h"

#include <limits>

#include "tests/cuda/mirror.h"
#include "tests/judge/workspace.h"
#include "tests/ops/offsets_case.h"

namespace cadre {
namespace {

using test::Tensor;

/// One problem with its tensors. Logits are multiples of 1/8, so there are many ties and no near
/// ties that fp32 and double would break differently.
struct Case {
  RoutingProblem p;
  Tensor logits, bias, experts, prob, scores, dprob, dscores, dlogits;
  test::OffsetsOut map;
  bool with_scores = true;

  Case(const RoutingProblem& problem, unsigned seed)
      : p(problem),
        logits(p.logits, {p.tokens, p.experts}, {.row_gap = 3}),
        bias(DType::kF32, {p.experts}),
        experts(DType::kI32, {p.tokens, p.top_k}),
        prob(DType::kF32, {p.tokens, p.top_k}),
        scores(DType::kF32, {p.tokens, p.experts}),
        dprob(DType::kF32, {p.tokens, p.top_k}),
        dscores(DType::kF32, {p.tokens, p.experts}),
        dlogits(p.logits, {p.tokens, p.experts}, {.row_gap = 5}),
        map(test::map_of(p)) {
    std::mt19937 random(seed);
    for (int64_t t = 0; t < p.tokens; ++t)
      for (int64_t e = 0; e < p.experts; ++e) logits.set({t, e}, double(random() % 97) / 8.0 - 6);
    bias.fill(random, 0, 1);
    dprob.fill(random, -2, 2);
    dscores.fill(random, -2, 2);
  }

  template <class View>
  RoutingArgs args(View&& view) {
    const auto floats = [&](const Tensor& t) { return static_cast<float*>(view(t).data); };
    RoutingArgs given{.logits = view(logits), .experts = static_cast<int32_t*>(view(experts).data)};
    if (p.backward) {
      given.dprob = floats(dprob);
      if (with_scores) given.dscores = floats(dscores);
      given.dlogits = view(dlogits);
    } else {
      if (p.expert_bias) given.expert_bias = floats(bias);
      given.prob = floats(prob);
      if (with_scores) given.scores = floats(scores);
    }
    const auto words = [&](const Tensor& t) { return static_cast<int32_t*>(view(t).data); };
    if (p.map) {
      given.offsets = words(map.offsets);
      given.map = {words(map.row_of), words(map.slot_of)};
      if (p.row_prob) given.row_prob = floats(map.row_prob);
    }
    return given;
  }
  void on_cpu(std::string_view only) {
    const RoutingPlan made = plan(p, this_cpu(), only);
    const test::OwnedWorkspace workspace(made.workspace_bytes);
    run(made, args([](const Tensor& t) { return t.view(); }), workspace.get(), {});
  }
  /// Returns how many launches it takes. What reads too early finds the right numbers in a second
  /// run.
  size_t on_gpu(int times = 2) {
    test::Mirror mirror;
    const RoutingPlan made = plan(p, test::first_gpu());
    EXPECT_EQ(made.name, "cuda_routing");
    const RoutingArgs given = args([&](const Tensor& t) { return mirror.view(t); });
    const Workspace workspace = mirror.workspace(made.workspace_bytes);
    return mirror.replay(times, [&](Stream stream) { run(made, given, workspace, stream); });
  }
  std::vector<char> outputs() const {
    std::vector<char> all;
    for (const Tensor* t : {&experts, &prob, &scores, &dlogits, &map.offsets, &map.row_of,
                            &map.slot_of, &map.row_prob})
      all.insert(all.end(), t->bytes().begin(), t->bytes().end());
    return all;
  }
};

/// Forward with its map, which other kernels make.
void check_map(Case before) {
  before.p.map = before.p.row_prob = true;
  before.map = test::OffsetsOut(test::map_of(before.p));
  Case got = before, want = before;
  got.on_gpu(1);
  want.on_cpu("cpu");
  EXPECT_EQ(got.outputs() == want.outputs(), true) << to_string(before.p);
}

/// Forward and backward of one case, which the GPU and the CPU begin alike.
void check_bits(const Case& before) {
  if (before.p.tokens <= 21) check_map(before);
  Case got = before, want = before;
  got.on_gpu();
  want.on_cpu("cpu");
  EXPECT_EQ(got.outputs() == want.outputs(), true) << to_string(before.p);
  got.p.backward = want.p.backward = true;
  got.on_gpu();
  want.on_cpu("cpu");
  EXPECT_EQ(got.outputs() == want.outputs(), true) << to_string(got.p);
}

/// The same, where the reference in double chooses as fp32 does.
void check(const Case& before) {
  Case want = before, reference = before;
  want.on_cpu("cpu");
  reference.on_cpu("cpu_reference");
  EXPECT_EQ(want.experts.bytes() == reference.experts.bytes(), true) << to_string(before.p);
  check_bits(before);
}

struct RoutingOnDevice : testing::TestWithParam<RoutingScore> {
  void SetUp() override {
    if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
  }
};

TEST_P(RoutingOnDevice, HasTheBitsOfTheCpu) {
  constexpr DType kTypes[] = {DType::kF32, DType::kBf16, DType::kF16};
  struct Sizes {
    int experts, top_k, groups, group_top_k;
  };
  constexpr Sizes kSizes[] = {{1, 1, 1, 1},  {3, 2, 1, 1},    {8, 8, 1, 1},    {64, 8, 1, 1},
                              {64, 6, 8, 3}, {256, 8, 8, 4},  {384, 8, 1, 1},  {12, 2, 4, 3},
                              {6, 3, 6, 5},  {100, 70, 1, 1}, {1024, 2, 1, 1}, {2000, 3, 1, 1}};
  unsigned seed = 1;
  for (const Sizes& sizes : kSizes)
    for (int64_t tokens : {0, 1, test::sized(70, 30)})
      for (bool normalize : {false, true})
        for (bool bias : {false, true}) {
          Case c({.score = GetParam(),
                  .tokens = sizes.experts > 300 ? tokens / 10 : tokens,
                  .experts = sizes.experts,
                  .top_k = sizes.top_k,
                  .logits = kTypes[seed % 3],
                  .normalize = normalize,
                  .scale = seed % 2 == 0 ? 2.5f : 1.0f,
                  .expert_bias = bias,
                  .groups = sizes.groups,
                  .group_top_k = sizes.group_top_k},
                 seed);
          c.with_scores = seed++ % 3 != 0;
          check(c);
        }
}

/// As many lanes and experts a lane as there are kernels for, all of a lane's experts or not.
TEST_P(RoutingOnDevice, OfEveryNumberOfLanes) {
  struct Sizes {
    int experts, top_k;
  };
  constexpr Sizes kSizes[] = {{2, 1},    {7, 7},    {16, 16},  {31, 8},   {32, 8},   {33, 8},
                              {57, 5},   {63, 8},   {64, 3},   {65, 8},   {96, 8},   {127, 6},
                              {128, 8},  {128, 9},  {129, 8},  {130, 16}, {250, 16}, {256, 8},
                              {256, 17}, {257, 12}, {300, 32}, {512, 32}, {511, 10}, {512, 33},
                              {513, 8},  {8, 2},    {36, 36},  {600, 40}};
  unsigned seed = 1;
  for (const Sizes& sizes : kSizes) {
    Case c({.score = GetParam(),
            .tokens = 5 + seed % 13,
            .experts = sizes.experts,
            .top_k = sizes.top_k,
            .logits = seed % 2 == 0 ? DType::kF32 : DType::kBf16,
            .normalize = seed % 3 == 0,
            .scale = 1.5f,
            .expert_bias = seed % 5 == 0},
           seed);
    c.with_scores = seed++ % 4 == 0;
    check(c);
  }
}

TEST_P(RoutingOnDevice, OfInfiniteAndNanLogits) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  struct Sizes {
    int experts, top_k, groups, group_top_k;
  };
  constexpr Sizes kSizes[] = {{16, 4, 1, 1}, {16, 4, 4, 2},  {128, 8, 1, 1},
                              {90, 8, 1, 1}, {200, 9, 1, 1}, {50, 40, 1, 1}};
  for (const Sizes& sizes : kSizes)
    for (bool with_scores : {true, false}) {
      Case c({.score = GetParam(),
              .tokens = 40,
              .experts = sizes.experts,
              .top_k = sizes.top_k,
              .normalize = true,
              .groups = sizes.groups,
              .group_top_k = sizes.group_top_k},
             6);
      c.with_scores = with_scores;
      for (int64_t t = 0; t < 40; ++t)
        for (int64_t e = 0; e < sizes.experts; ++e) {
          if ((t * 7 + e * 5) % 3 == 0 || t < 4)
            c.logits.set({t, e}, t % 2 == 0 ? -kInfinity : double(NAN));
          if (t % 5 == 4 && (t + e) % 7 == 0) c.logits.set({t, e}, kInfinity);
        }
      check(c);
      if (!with_scores) check_map(c);
    }
}

/// Logits by number; the experts that are not named have -3 or less.
using Logits = std::vector<std::pair<int64_t, float>>;

/// A token for each list.
Case tokens_of(RoutingScore score, int experts, int top_k, const std::vector<Logits>& tokens) {
  Case c({.score = score, .tokens = int64_t(tokens.size()), .experts = experts, .top_k = top_k}, 3);
  c.with_scores = false;
  for (size_t t = 0; t < tokens.size(); ++t) {
    for (int64_t e = 0; e < experts; ++e) c.logits.set({int64_t(t), e}, -3 - double(e % 17) / 8);
    for (const auto& [e, logit] : tokens[t]) c.logits.set({int64_t(t), e}, logit);
  }
  return c;
}

// Lane 3 of 8 has the experts 3, 11, 19, ....
TEST_P(RoutingOnDevice, OfTheExpertsOfOneLane) {
  std::vector<Logits> tokens(6);
  for (int i = 0; i < 16; ++i) {
    tokens[0].push_back({3 + 8 * i, 1 + 0.25f * float(i)});
    tokens[1].push_back({3 + 8 * i, 5 - 0.25f * float(i)});
    tokens[2].push_back({3 + 8 * i, 2});  // equal
    tokens[3].push_back({3 + 8 * i, float(i / 5)});
    tokens[4].push_back({3 + 8 * i, i < 8 ? 4.0f : 3.0f});
    tokens[5].push_back({3 + 8 * i, i < 9 ? 4.0f : 4.0000005f});
  }
  check(tokens_of(GetParam(), 128, 8, tokens));
  check(tokens_of(GetParam(), 125, 8, {tokens[0], tokens[5]}));
}

// The last choice and what comes after it: equal, nearly equal, and nearly equal behind an equal.
TEST_P(RoutingOnDevice, OfCloseLogits) {
  constexpr float kBase = 1.5f, kMore = 1.5000001f, kYetMore = 1.5000002f;
  const std::vector<Logits> tokens = {
      {{9, kBase}, {5, kBase}, {77, 4}, {40, kBase}},
      {{9, kBase}, {5, kMore}, {77, 4}, {40, kBase}},
      {{9, kBase}, {5, kBase}, {77, 4}, {40, kMore}},
      {{1, kBase}, {2, kBase}, {3, kBase}, {100, kMore}},
      {{1, kBase}, {2, kBase}, {3, kBase}, {4, kMore}, {9, kYetMore}},
      {{1, kBase}, {9, kBase}, {17, kBase}, {25, kMore}, {33, kYetMore}},
      {{8, 0.0f}, {16, -0.0f}, {5, 0.0f}, {6, -0.0f}},
      {{16, 0.0f}, {8, -0.0f}, {6, 1e-30f}, {5, -1e-30f}},
      {{7, 3e38f}, {8, -3e38f}, {9, 2e38f}}};
  for (int top_k : {1, 2, 3, 4}) check_bits(tokens_of(GetParam(), 128, top_k, tokens));
}

// e^x in fp32 is greater for the lesser of these two, in the last bit and all above it that a key
// has. Divided by some sums they are equal, so that the greater logit comes first.
TEST_P(RoutingOnDevice, OfLogitsWhoseWeightsAreInAnotherOrder) {
  constexpr float kLesser = -0x1.ff86e2p-4f, kGreater = -0x1.ff86e0p-4f;
  for (int top_k : {2, 3}) {
    Case c({.score = GetParam(), .tokens = 16, .experts = 128, .top_k = top_k}, 5);
    c.with_scores = false;  // scores that are wanted are divided before they are keys
    for (int64_t t = 0; t < 16; ++t)
      for (int64_t e = 0; e < 128; ++e)
        c.logits.set({t, e}, e == 0     ? 0
                             : e == 2   ? kLesser
                             : e == 100 ? kGreater
                                        : -3.4 - 0.04 * double(t));
    check_bits(c);
  }
}

/// Most ranks are a few units in the last place apart, and not in the order of the logits.
TEST_P(RoutingOnDevice, OfRandomCloseLogits) {
  struct Sizes {
    int experts, top_k;
  };
  unsigned seed = 20;
  for (const Sizes& sizes : {Sizes{128, 8}, {20, 8}, {64, 8}, {256, 8}, {300, 20}})
    for (bool bias : {false, true})
      for (double center : {-0.03, -2.0, 20.0}) {
        Case c({.score = GetParam(),
                .tokens = 21,
                .experts = sizes.experts,
                .top_k = sizes.top_k,
                .expert_bias = bias},
               seed);
        c.with_scores = seed % 2 == 0;
        std::mt19937 random(seed++);
        for (int64_t t = 0; t < 21; ++t) {
          const unsigned apart = 1u << (t % 10);
          for (int64_t e = 0; e < sizes.experts; ++e)
            c.logits.set({t, e}, center * (1 + double(random() % 40 * apart) * 0x1p-23));
          c.logits.set({t, 0}, 0);
        }
        for (int64_t e = 0; e < sizes.experts; ++e)
          c.bias.set({e}, 0.5 + double(random() % 6) * 0x1p-23);
        check_bits(c);
      }
}

/// Scores down to the least numbers, and zeros.
TEST_P(RoutingOnDevice, OfLogitsFarApart) {
  for (int experts : {30, 128, 200}) {
    Case c({.score = GetParam(), .tokens = 20, .experts = experts, .top_k = 8, .normalize = true},
           11);
    for (int64_t t = 0; t < 20; ++t)
      for (int64_t e = 0; e < experts; ++e)
        c.logits.set({t, e}, -double((e * 37 + t) % experts) * (0.5 + 0.1 * double(t)));
    check(c);
  }
}

// Scores that are zero are equal whatever the logits are. Experts 3 and 35 are of one lane.
TEST_P(RoutingOnDevice, TheGreaterLogitOfEqualRanksIsChosen) {
  for (int groups : {1, 2})
    for (int64_t other : {35, 36}) {
      Case c({.score = GetParam(),
              .tokens = 2,
              .experts = 64,
              .top_k = 2,
              .expert_bias = true,
              .groups = groups,
              .group_top_k = groups},
             7);
      for (int64_t e = 0; e < 64; ++e) {
        c.bias.set({e}, e == 3 || e == 7 || e == other ? 0 : -1);
        for (int64_t t : {0, 1})
          c.logits.set({t, e}, e == 7       ? 0.0
                               : e == other ? -200 - 10 * double(t)
                               : e == 3     ? -205
                                            : -300);
      }
      check(c);
    }
}

/// Of 70 choices, which 32 lanes have, most are of an expert that is chosen again.
TEST_P(RoutingOnDevice, BackwardSkipsWhatIsNoExpertAndAddsWhatIsChosenTwice) {
  struct Sizes {
    int experts, top_k, chosen;
  };
  for (const Sizes& sizes :
       {Sizes{33, 5, 36}, {80, 70, 20}, {128, 8, 20}, {64, 7, 9}, {200, 16, 40}, {400, 32, 60}})
    for (bool with_scores : {true, false}) {
      Case got({.backward = true,
                .score = GetParam(),
                .tokens = 50,
                .experts = sizes.experts,
                .top_k = sizes.top_k,
                .logits = with_scores ? DType::kF32 : DType::kBf16,
                .normalize = true},
               8);
      got.with_scores = with_scores;
      std::mt19937 random(8);
      for (int64_t i = 0; i < 50 * sizes.top_k; ++i)
        got.experts.data<int32_t>()[i] =
            i % 7 == 0 ? int32_t(random()) : int32_t(random() % unsigned(sizes.chosen)) - 2;
      Case want = got;
      got.on_gpu();
      want.on_cpu("cpu");
      EXPECT_EQ(got.outputs() == want.outputs(), true) << to_string(got.p);
    }
}

TEST_P(RoutingOnDevice, OfManyTokens) {
  Case c({.score = GetParam(),
          .tokens = test::sized(20'000, 1'500),
          .experts = 128,
          .top_k = 8,
          .logits = DType::kBf16,
          .normalize = true},
         9);
  std::mt19937 random(9);
  c.logits.fill(random, -8, 8);
  Case want = c;
  c.on_gpu();
  want.on_cpu("cpu");
  EXPECT_EQ(c.outputs() == want.outputs(), true);
}

struct MapSizes {
  int64_t tokens;
  int experts, top_k;
  size_t launches;
};

/// In registers one block takes 32 tokens, 64 of at most 128 experts and 16 choices, 16 of more
/// than 256 experts; each of several takes 16: 64 blocks are few, and 6 on the emulator. In shared
/// memory a block takes 4 tokens, or 1 where experts are many. What is more takes two launches, as
/// what does not fit into shared memory.
std::vector<MapSizes> map_sizes() {
  using test::sized;
  return {{0, 3, 2, 1},
          {1, 1, 1, 1},
          {16, 64, 8, 1},
          {17, 64, 8, 1},
          {32, 200, 8, 1},
          {33, 200, 8, 1},
          {17, 300, 8, 1},
          {61, 128, 8, 1},
          {64, 100, 16, 1},
          {64, 100, 17, 1},
          {65, 100, 16, 1},
          {95, 128, 8, 1},
          {48, 130, 8, 1},
          {96, 257, 32, 1},
          {24, 501, 10, 1},
          {6, 502, 40, 1},
          {24, 300, 40, 1},
          {5, 2000, 3, 1},
          {sized(1024, 96), 12, 4, 1},
          {sized(1025, 97), 13, 3, 2},
          {sized(1025, 97), 61, 13, 2},
          {sized(705, 97), 512, 8, 2},
          {sized(704, 96), 512, 32, 1},
          {sized(1024, 96), 362, 8, 1},
          {sized(1024, 97), 363, 8, 2},
          {sized(65, 7), 2000, 2, 2}};
}

TEST_P(RoutingOnDevice, WithMapTakesOneLaunchOfFewTokensAndTwoOfMany) {
  auto seed = unsigned(GetParam());  // so that each size has different and equal logits
  for (const MapSizes& sizes : map_sizes()) {
    const bool alike = ++seed % 2 == 0;
    Case got({.score = GetParam(),
              .tokens = sizes.tokens,
              .experts = sizes.experts,
              .top_k = sizes.top_k,
              .map = true,
              .row_prob = seed % 3 != 0},  // one or both of these two
             seed);
    std::mt19937 random(seed);
    if (alike) got.logits.fill(random, 0, 0);
    Case want = got;
    EXPECT_EQ(got.on_gpu(alike ? 2 : 1), sizes.launches) << to_string(got.p);
    want.on_cpu("cpu");
    EXPECT_EQ(got.outputs() == want.outputs(), true) << to_string(got.p);
    EXPECT_EQ(got.map.has_row_prob_of(got.prob), got.p.row_prob || got.p.tokens == 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Routing, RoutingOnDevice,
                         testing::Values(RoutingScore::kSoftmax, RoutingScore::kTopKSoftmax,
                                         RoutingScore::kSigmoid));

}  // namespace
}  // namespace cadre
