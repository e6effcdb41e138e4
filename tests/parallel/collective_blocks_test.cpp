// Ranks that are threads and send blocks, against ranks that send what they have, and against one
// rank that has all tokens and experts: the same bits of everything.
#include <gtest/gtest.h>

#include <random>

#include "tests/parallel/collective_case.h"
#include "tests/parallel/rank_difference.h"

using namespace cadre;
using test::CollectiveCase;
using test::CollectiveGroup;
using test::Tensor;

namespace {

#ifdef CADRE_EMULATED
constexpr int kRoutings = 6, kDrops = 10;
#else
constexpr int kRoutings = 30, kDrops = 40;
#endif

/// Most choices of one rank's tokens that are of one rank's experts.
int64_t most_of_pairs(const ExpertParallelProblem& p, const std::vector<test::RankCase>& ranks) {
  int64_t most = 0;
  for (const test::RankCase& r : ranks) {
    std::vector<int64_t> of(size_t(p.ranks), 0);
    for (const int32_t e : r.experts)
      if (e >= 0 && e < p.ranks * p.experts) most = std::max(most, ++of[size_t(e / p.experts)]);
  }
  return most;
}

std::vector<CollectiveCase> with_problem(const ExpertParallelProblem& p,
                                         const std::vector<test::RankCase>& ranks) {
  std::vector<CollectiveCase> cases;
  for (test::RankCase r : ranks) {
    r.p = p;
    cases.emplace_back(r);
  }
  return cases;
}

/// Runs all four exchanges on all ranks; what they threw, one behind the other.
std::string run(CollectiveGroup& group, std::vector<CollectiveCase>& ranks) {
  std::string all;
  for (const std::string& error : test::on_ranks(
           int(ranks.size()), [&](int q) { step(group.ranks[size_t(q)], ranks[size_t(q)]); }))
    all += error;
  return all;
}

/// Where places, rows and slots do not belong together; empty if nowhere.
std::string difference_of_maps(const CollectiveCase& r) {
  int64_t taken = 0, here = 0;
  for (size_t slot = 0; slot < r.row_of.size(); ++slot) {
    const int32_t place = r.row_of[slot];
    if (place < 0) continue;
    ++taken;
    if (place / r.p.block != r.experts[slot] / r.p.experts) return text("rank of slot ", slot);
    if (r.slot_of[size_t(place)] != int32_t(slot)) return text("slot_of of place ", place);
  }
  for (const int32_t slot : r.slot_of) taken -= slot >= 0;
  for (const int32_t row : r.row_at) here += row >= 0;
  for (int64_t row = 0; row < r.used(); ++row)
    if (r.row_at[size_t(r.came_at[size_t(row)])] != row) return text("row_at of row ", row);
  return taken == 0 && here == r.used() ? "" : "places without a row have one";
}

/// Every byte that exchanges wrote.
std::vector<std::vector<char>> bytes_of(const CollectiveCase& r) {
  std::vector<std::vector<char>> all;
  for (const Tensor* t : {&r.rows, &r.row_prob, &r.out, &r.dy, &r.dx, &r.dprob})
    all.emplace_back(t->bytes().begin(), t->bytes().end());
  return all;
}

class RandomRoutings : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, RandomRoutings, testing::Values(1, 2, 3, 4));

TEST_P(RandomRoutings, HaveTheBitsOfOneRankAndOfMessagesOfAnySize) {
  std::mt19937 random(static_cast<unsigned>(GetParam()));
  for (int i = 0; i < kRoutings; ++i) {
    ExpertParallelProblem p = test::random_exchange(GetParam(), random);
    const ExpertParallelProblem any_size = p;
    std::vector<test::RankCase> drawn = test::random_ranks(p, random);
    for (test::RankCase& r : drawn)
      if (r.tokens() > 0)
        for (Tensor* t : {&r.x, &r.prob, &r.dout}) t->set({0, 0}, -0.0);
    p.block = std::max<int64_t>(most_of_pairs(p, drawn) + int64_t(random() % 3), 1);
    ExpertParallelProblem by_token = any_size;
    by_token.cross = Crossing::kToken;
    std::vector<CollectiveCase> ranks = with_problem(p, drawn),
                                others = with_problem(any_size, drawn),
                                once = with_problem(by_token, drawn);
    CollectiveGroup group(p), other(any_size), of_tokens(by_token);
    ASSERT_EQ(run(group, ranks) + run(other, others) + run(of_tokens, once), "");
    const test::RankCase all = test::on_one(p, drawn);
    for (int q = 0; q < p.ranks; ++q) {
      const CollectiveCase& r = ranks[size_t(q)];
      ASSERT_EQ(difference(p, q, r, all) + difference_of_maps(r), "") << to_string(p);
      EXPECT_EQ(bytes_of(r), bytes_of(others[size_t(q)])) << to_string(p);
      EXPECT_EQ(bytes_of(r), bytes_of(once[size_t(q)])) << to_string(p);
      EXPECT_EQ(r.routed, others[size_t(q)].routed);
      group.ranks[size_t(q)].check();
    }
  }
}

TEST(CollectiveBlocks, OfRoutingsThatAreFarFromEven) {
  ExpertParallelProblem p{.tokens = 7, .top_k = 3, .hidden = 5, .experts = 2, .ranks = 4};
  p.rows = p.ranks * p.tokens * p.top_k;
  p.block = p.tokens * p.top_k;
  CollectiveGroup group(p);
  std::mt19937 random(3);
  constexpr int32_t kFar = std::numeric_limits<int32_t>::max();
  // One expert; none; none of which there is; the last rank's, of one rank's tokens alone.
  for (const std::array<int32_t, 2> chosen : {std::array{5, 5}, {-1, -1}, {8, kFar}, {7, -3}})
    for (const int64_t others : {7, 0, 1}) {
      std::vector<test::RankCase> drawn;
      for (int q = 0; q < p.ranks; ++q) {
        test::RankCase& r = drawn.emplace_back(p, q == 2 ? p.tokens : others);
        for (Tensor* t : {&r.x, &r.dout}) t->fill(random, -2, 2);
        r.prob.fill(random, 0, 1);
        std::fill(r.experts.begin(), r.experts.end(), chosen[q == 2 ? 0 : 1]);
      }
      std::vector<CollectiveCase> ranks = test::collective_cases(drawn);
      ASSERT_EQ(run(group, ranks), "");
      const test::RankCase all = test::on_one(p, drawn);
      for (int q = 0; q < p.ranks; ++q)
        EXPECT_EQ(difference(p, q, ranks[size_t(q)], all) + difference_of_maps(ranks[size_t(q)]),
                  "");
    }
}

/// Choices beyond the block of their pair of ranks are of nobody, in the order of (expert, token,
/// choice).
int64_t drop_beyond_blocks(const ExpertParallelProblem& p, std::vector<test::RankCase>& ranks) {
  int64_t dropped = 0;
  for (test::RankCase& r : ranks) {
    std::vector<int64_t> of(size_t(p.ranks), 0);
    for (int32_t e = 0; e < p.ranks * p.experts; ++e)
      for (int32_t& chosen : r.experts)
        if (chosen == e && ++of[size_t(e / p.experts)] > p.block) chosen = -1, ++dropped;
  }
  return dropped;
}

TEST(CollectiveBlocks, DropWhatHasNoRoomInABlockOrAtItsRank) {
  std::mt19937 random(7);
  int64_t of_blocks = 0, of_ranks = 0;
  for (int i = 0; i < kDrops; ++i) {
    ExpertParallelProblem p{.tokens = 16, .top_k = 3, .hidden = 5, .experts = 3, .ranks = 3};
    p.rows = int64_t(random() % 60);
    p.block = int64_t(1 + random() % 30);
    p.overflow = Overflow::kDrop;
    CollectiveGroup group(p);
    std::vector<test::RankCase> drawn = test::random_ranks(p, random);
    std::vector<CollectiveCase> ranks = test::collective_cases(drawn);
    ASSERT_EQ(run(group, ranks), "");
    const std::vector<int32_t> routed = ranks[0].routed;
    std::vector<int32_t> want(3, 0);
    for (const test::RankCase& r : drawn)
      for (const int32_t e : r.experts)
        if (e >= 0 && e < 9) ++want[size_t(e / 3)];
    of_blocks += drop_beyond_blocks(p, drawn);
    of_ranks += test::drop(p, drawn);
    const test::RankCase all = test::on_one(p, drawn);
    for (int q = 0; q < p.ranks; ++q) {
      EXPECT_EQ(difference(p, q, ranks[size_t(q)], all), "") << to_string(p);
      EXPECT_EQ(ranks[size_t(q)].routed, want);
      group.ranks[size_t(q)].check();
    }
  }
  EXPECT_GT(of_blocks, 10 * kDrops / 8);
  EXPECT_GT(of_ranks, 10 * kDrops / 8);
}

/// Two ranks whose rows overflow.
struct Overflowing : testing::Test {
  std::vector<CollectiveCase> cases(const ExpertParallelProblem& p) {
    std::mt19937 random(1);
    std::vector<CollectiveCase> ranks;
    for (int q = 0; q < 2; ++q) {
      CollectiveCase& r = ranks.emplace_back(test::RankCase(p, 4));
      for (Tensor* t : {&r.x, &r.dout, &r.out, &r.dx, &r.rows}) t->fill(random, -2, 2);
      r.prob.fill(random, 0, 1);
      r.experts = {2, 3, 2, 3, 2, 3, 2, q};  // 14 rows for rank 1, 2 for rank 0; 7 from each
    }
    return ranks;
  }
  std::vector<std::string> step_all(CollectiveGroup& group, std::vector<CollectiveCase>& ranks) {
    return test::on_ranks(2, [&](int q) { step(group.ranks[size_t(q)], ranks[size_t(q)]); });
  }
  std::vector<std::string> check_all(CollectiveGroup& group) {
    return test::on_ranks(2, [&](int q) { group.ranks[size_t(q)].check(); });
  }
  const std::vector<std::string> nothing{"", ""};

  /// Of a problem in which these overflow: NaN everywhere, and one error, of the next dispatch or
  /// of check().
  void expect_error(const ExpertParallelProblem& p) {
    const std::string want =
        text("expert_parallel: rows of rank 1 are 14, must be at most R, ", p.rows,
             ", and those from one rank to another 7, at most block, ", p.block,
             "; that step is NaN on every rank; R = 14 and block = 7 would have held them [",
             to_string(p), "]");
    CollectiveGroup group(p);
    std::vector<CollectiveCase> ranks = cases(p);
    EXPECT_EQ(step_all(group, ranks), nothing);
    for (const CollectiveCase& r : ranks) {
      EXPECT_EQ(r.verdict[0], 1);
      EXPECT_EQ(r.routed, (std::vector<int32_t>{2, 14}));
      EXPECT_EQ(r.damage(), "");
      for (const Tensor* t : {&r.rows, &r.row_prob, &r.out, &r.dy, &r.dx, &r.dprob})
        for (const double value : t->values()) EXPECT_TRUE(std::isnan(value));
    }
    for (const std::string& error : step_all(group, ranks)) EXPECT_EQ(error, want);
    EXPECT_EQ(check_all(group), nothing);
    step_all(group, ranks);
    for (const std::string& error : check_all(group)) EXPECT_EQ(error, want);
    EXPECT_EQ(check_all(group), nothing);
    for (CollectiveCase& r : ranks) r.experts = {0, 1, 2, 3, 0, 1, 2, 3};
    EXPECT_EQ(step_all(group, ranks), nothing);
    EXPECT_FALSE(std::isnan(ranks[0].out.at(0, 0)));
  }
};

TEST_F(Overflowing, ABlockIsNaNOnEveryRankAndAnErrorOfTheNextDispatch) {
  const ExpertParallelProblem p{
      .tokens = 4, .top_k = 2, .hidden = 3, .experts = 2, .ranks = 2, .rows = 16, .block = 6};
  expect_error(p);
}

TEST_F(Overflowing, ARankIsToo) {
  const ExpertParallelProblem p{
      .tokens = 4, .top_k = 2, .hidden = 3, .experts = 2, .ranks = 2, .rows = 13, .block = 8};
  expect_error(p);
}

// What fits to the last place is no overflow.
TEST_F(Overflowing, NothingWhereAllFits) {
  const ExpertParallelProblem p{
      .tokens = 4, .top_k = 2, .hidden = 3, .experts = 2, .ranks = 2, .rows = 14, .block = 7};
  CollectiveGroup group(p);
  std::vector<CollectiveCase> ranks = cases(p);
  EXPECT_EQ(step_all(group, ranks), nothing);
  EXPECT_EQ(check_all(group), nothing);
  for (const CollectiveCase& r : ranks) EXPECT_EQ(r.verdict, (std::vector<int32_t>{0, 0, 14}));
}

TEST(CollectiveBlocks, MoveTheSameBytesWhateverIsChosen) {
  const ExpertParallelProblem p{
      .tokens = 6, .top_k = 2, .hidden = 8, .experts = 1, .ranks = 2, .rows = 24, .block = 12};
  CollectiveGroup group(p);
  std::mt19937 random(5);
  for (int i = 1; i <= 3; ++i) {
    std::vector<CollectiveCase> ranks = test::collective_cases(test::random_ranks(p, random));
    for (const std::string& error : test::on_ranks(2, [&](int q) {
           const test::OwnedWorkspace workspace(group.plan.workspace_bytes);
           dispatch(group.ranks[size_t(q)], ranks[size_t(q)].collective_dispatch_args(),
                    workspace.get(), {});
         }))
      EXPECT_EQ(error, "");
    // Rows, probabilities, experts; and what each rank says to each.
    EXPECT_EQ(group.engine.bytes(), i * 4 * (12 * (8 * 2 + 4 + 4) + (2 + 2) * 4));
  }
}

TEST(CollectiveBlocks, WriteTailsAsTheProblemSays) {
  ExpertParallelProblem p{.tokens = 5, .top_k = 2, .hidden = 3, .experts = 2, .ranks = 2};
  p.rows = 2 * (p.block = 10) + 3;
  p.tail = Tail::kZero;
  CollectiveGroup group(p);
  std::mt19937 random(3);
  std::vector<CollectiveCase> ranks = test::collective_cases(test::random_ranks(p, random));
  EXPECT_EQ(run(group, ranks), "");
  for (const CollectiveCase& r : ranks)
    for (int64_t row = r.used(); row < p.rows; ++row) {
      EXPECT_EQ(r.row_prob.at(row), 0);
      for (int64_t h = 0; h < p.hidden; ++h) EXPECT_EQ(r.rows.at(row, h) + r.dy.at(row, h), 0);
    }
}

/// What each of two ranks throws behind a dispatch of its own problem and number, whose rows are
/// NaN.
std::vector<std::string> dispatched(const std::array<ExpertParallelProblem, 2>& problems,
                                    const std::array<int, 2>& numbers) {
  test::ThreadEngine engine(2);
  return test::on_ranks(2, [&](int q) {
    const ExpertParallelPlan made = plan(problems[size_t(q)], test::rank_device(), "collective");
    Collective own(made, numbers[size_t(q)], engine.of(q));
    CollectiveCase r(test::RankCase(made.problem, 1));
    r.experts.assign(r.experts.size(), 0);
    const test::OwnedWorkspace workspace(made.workspace_bytes);
    dispatch(own, r.collective_dispatch_args(), workspace.get(), {});
    EXPECT_TRUE(std::isnan(r.rows.at(0, 0)));
    own.check();
  });
}

TEST(CollectiveBlocks, OfRanksThatDifferAreNaNAndAnError) {
  ExpertParallelProblem p{.tokens = 3, .top_k = 2, .hidden = 4, .ranks = 2, .rows = 12, .block = 6};
  for (const Overflow overflow : {Overflow::kError, Overflow::kDrop}) {
    p.overflow = overflow;
    ExpertParallelProblem other = p;
    other.layer = 1;
    const std::vector<std::string> errors = dispatched({p, other}, {0, 1});
    for (const std::string& words : errors)
      EXPECT_EQ(words.substr(0, words.find(';')),
                "dispatch: the problem of rank 1 is not that of rank 0, must be the same");
    EXPECT_NE(errors[1].find("layer=1"), std::string::npos);
    for (const std::string& words : dispatched({p, p}, {1, 0}))
      EXPECT_EQ(words, text("dispatch: rank 0 of the engine says that it is rank 1, must be 0 [",
                            to_string(p), "]"));
  }
}

}  // namespace
