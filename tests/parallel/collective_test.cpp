// Ranks that are threads and have an engine, against one rank that has all tokens and experts: the
// same bits of everything.
#include "cadre/collective.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "tests/parallel/collective_case.h"
#include "tests/parallel/rank_difference.h"
#include "tests/parallel/sent.h"

using namespace cadre;
using test::CollectiveCase;
using test::CollectiveGroup;
using test::Tensor;

namespace {

/// Tokens that leave for a rank, or, by host, for a host, each once; empty if they are, in the
/// order of experts.
std::string difference_of_tokens(const CollectiveCase& r) {
  const int each = r.p.experts * (r.passing.empty() ? 1 : r.p.host_ranks);
  std::set<std::pair<int, int>> want, got;
  for (size_t slot = 0; slot < r.experts.size(); ++slot) {
    const int expert = r.experts[slot];
    if (expert >= 0 && expert < r.p.ranks * r.p.experts)
      want.emplace(expert / each, int(slot) / r.p.top_k);
  }
  for (int e = 0; e < r.p.ranks * r.p.experts; ++e)
    for (int32_t i = r.leaving[size_t(e)]; i < r.leaving[size_t(e) + 1]; ++i) {
      const int32_t slot = r.slot_of[size_t(i)];
      if (r.experts[size_t(slot)] != e) return text("token ", i, " leaves for another expert");
      if (!got.emplace(e / each, slot / r.p.top_k).second) return text("token ", i, " twice");
    }
  return got == want ? "" : "a token does not leave";
}

/// Where slots, rows that leave and rows that come do not belong together; empty if nowhere.
std::string difference_of_maps(const CollectiveCase& r) {
  if (r.p.cross != Crossing::kChoice) return difference_of_tokens(r);
  for (int64_t slot = 0; slot < int64_t(r.row_of.size()); ++slot) {
    const int32_t row = r.row_of[size_t(slot)], expert = r.experts[size_t(slot)];
    const bool is_of_some = expert >= 0 && expert < r.p.ranks * r.p.experts;
    if (is_of_some != (row >= 0)) return text("row_of of slot ", slot, " is ", row);
    if (row >= 0 && r.slot_of[size_t(row)] != slot) return text("slot_of of row ", row);
    if (row >= 0 && (row < r.leaving[size_t(expert)] || row >= r.leaving[size_t(expert) + 1]))
      return text("row ", row, " leaves with another expert than ", expert);
  }
  for (int64_t row = 0; row < r.used(); ++row)
    if (r.row_at[size_t(r.came_at[size_t(row)])] != row) return text("row_at of row ", row);
  return {};
}

struct RandomRoutings : testing::TestWithParam<std::tuple<int, Crossing>> {};
INSTANTIATE_TEST_SUITE_P(Ranks, RandomRoutings,
                         testing::Combine(testing::Values(1, 2, 3, 4),
                                          testing::Values(Crossing::kToken, Crossing::kHost,
                                                          Crossing::kChoice)));

/// What must be so whatever crosses.
struct Collectives : testing::TestWithParam<Crossing> {};
INSTANTIATE_TEST_SUITE_P(Crossings, Collectives,
                         testing::Values(Crossing::kToken, Crossing::kHost, Crossing::kChoice));
struct BytesBetweenRanks : testing::TestWithParam<Crossing> {};
INSTANTIATE_TEST_SUITE_P(Crossings, BytesBetweenRanks,
                         testing::Values(Crossing::kToken, Crossing::kChoice));

#ifdef CADRE_EMULATED
constexpr int kProblems = 3, kRoutings = 4;
#else
constexpr int kProblems = 10, kRoutings = 8;
#endif

TEST_P(RandomRoutings, HaveTheBitsOfOneRank) {
  const auto [of, cross] = GetParam();
  std::mt19937 random(static_cast<unsigned>(of));
  for (int i = 0; i < kProblems; ++i) {
    ExpertParallelProblem p = test::random_exchange(of, random);
    test::cross_by(p, cross);
    if (cross == Crossing::kHost) p.host_ranks = 1 + int(random() % unsigned(of));
    CollectiveGroup group(p);
    ASSERT_EQ(group.plan.by_token, cross != Crossing::kChoice);
    ASSERT_EQ(group.plan.by_host, p.host_ranks > 1 && p.host_ranks < of);
    for (int again = 0; again < kRoutings; ++again) {
      const std::vector<test::RankCase> drawn = test::random_ranks(p, random);
      const test::RankCase all = test::on_one(p, drawn);
      std::vector<CollectiveCase> ranks = test::collective_cases(drawn);
      const auto errors =
          test::on_ranks(p.ranks, [&](int q) { step(group.ranks[size_t(q)], ranks[size_t(q)]); });
      for (int q = 0; q < p.ranks; ++q) {
        ASSERT_EQ(errors[size_t(q)], "");
        const CollectiveCase& r = ranks[size_t(q)];
        ASSERT_EQ(difference(p, q, r, all) + difference_of_maps(r), "") << to_string(p);
      }
    }
  }
}

TEST_P(Collectives, DropsWhatHasNoRoomAsOneRankWould) {
  std::mt19937 random(7);
  int64_t dropped = 0;
  for (int i = 0; i < 60; ++i) {
    ExpertParallelProblem p{.tokens = 16, .top_k = 3, .hidden = 5, .experts = 3, .ranks = 3};
    p.rows = int64_t(random() % 60);
    p.overflow = Overflow::kDrop;
    test::cross_by(p, GetParam());
    CollectiveGroup group(p);
    std::vector<test::RankCase> drawn = test::random_ranks(p, random);
    std::vector<CollectiveCase> ranks = test::collective_cases(drawn);
    for (const std::string& error : test::on_ranks(p.ranks, [&](int q) {
           step(group.ranks[size_t(q)], ranks[size_t(q)]);
           group.ranks[size_t(q)].check();
         }))
      ASSERT_EQ(error, "");
    const int64_t now = test::drop(p, drawn);
    int64_t beyond = 0;
    for (const int32_t rows : ranks[0].routed) beyond += std::max<int64_t>(rows - p.rows, 0);
    EXPECT_EQ(now, beyond);
    const test::RankCase all = test::on_one(p, drawn);
    for (int q = 0; q < p.ranks; ++q) EXPECT_EQ(difference(p, q, ranks[size_t(q)], all), "");
    dropped += now;
  }
  EXPECT_GT(dropped, 100);
}

TEST_P(Collectives, OverflowIsNaNOnEveryRankAndAnErrorOfTheNextDispatch) {
  ExpertParallelProblem p{
      .tokens = 4, .top_k = 2, .hidden = 3, .experts = 2, .ranks = 2, .rows = 9};
  test::cross_by(p, GetParam());
  CollectiveGroup group(p);
  std::mt19937 random(1);
  std::vector<CollectiveCase> ranks;
  for (int q = 0; q < 2; ++q) {
    CollectiveCase& r = ranks.emplace_back(test::RankCase(p, 4));
    for (Tensor* t : {&r.x, &r.dout, &r.out, &r.dx, &r.rows}) t->fill(random, -2, 2);
    r.prob.fill(random, 0, 1);
    r.experts = {2, 3, 2, 3, 2, 3, 2, q};  // 14 rows for rank 1, 2 for rank 0
  }
  const auto run = [&](int q) { step(group.ranks[size_t(q)], ranks[size_t(q)]); };
  const std::string want =
      "expert_parallel: rows of rank 1 are 14, must be at most R, 9; that step is NaN on every "
      "rank; R = 14, or 1.75 times T * top_k, would have held them [" +
      to_string(p) + "]";
  for (const std::string& error : test::on_ranks(2, run)) EXPECT_EQ(error, "");
  for (const CollectiveCase& r : ranks) {
    EXPECT_EQ(r.verdict[0], 1);
    EXPECT_EQ(r.routed, (std::vector<int32_t>{2, 14}));
    EXPECT_EQ(r.damage(), "");
    for (const Tensor* t : {&r.rows, &r.row_prob, &r.out, &r.dy, &r.dx, &r.dprob})
      for (const double value : t->values()) EXPECT_TRUE(std::isnan(value));
  }
  for (const std::string& error : test::on_ranks(2, run)) EXPECT_EQ(error, want);
  for (CollectiveCase& r : ranks) r.experts = {0, 1, 2, 3, 0, 1, 2, 3};
  for (const std::string& error : test::on_ranks(2, run)) EXPECT_EQ(error, "");
  EXPECT_FALSE(std::isnan(ranks[0].out.at(0, 0)));
  for (CollectiveCase& r : ranks) r.experts = {2, 3, 2, 3, 2, 3, 2, 3};
  test::on_ranks(2, run);
  const auto check = [&](int q) { group.ranks[size_t(q)].check(); };
  for (const std::string& error : test::on_ranks(2, check))
    EXPECT_EQ(error.substr(0, 40), "expert_parallel: rows of rank 1 are 16, ");
  for (const std::string& error : test::on_ranks(2, check)) EXPECT_EQ(error, "");
}

/// What the engine is given in a call, of all ranks.
template <class Call>
int64_t bytes_of(CollectiveGroup& group, Call&& call) {
  const int64_t before = group.engine.bytes();
  for (const std::string& error : test::on_ranks(group.plan.problem.ranks, [&](int q) {
         call(group.ranks[size_t(q)], q, test::OwnedWorkspace(group.plan.workspace_bytes).get());
       }))
    EXPECT_EQ(error, "");
  return group.engine.bytes() - before;
}

// A rank sends what it has, and no block that is padded: rows, or tokens once, but no more tokens
// than rows with room.
TEST_P(BytesBetweenRanks, AreNoMoreThanTheProblemSays) {
  std::mt19937 random(5);
  int64_t saved = 0, dropped = 0;
  for (int i = 0; i < 20; ++i) {
    ExpertParallelProblem p{.tokens = 12, .top_k = 4, .hidden = 8, .experts = 2, .ranks = 3};
    p.rows = i < 10 ? 144 : int64_t(random() % 50);
    p.overflow = Overflow::kDrop;
    test::cross_by(p, GetParam());
    CollectiveGroup group(p);
    std::vector<test::RankCase> drawn = test::random_ranks(p, random);
    std::vector<CollectiveCase> ranks = test::collective_cases(drawn);
    const int64_t of_dispatch = bytes_of(group, [&](Collective& own, int q, Workspace memory) {
      dispatch(own, ranks[size_t(q)].collective_dispatch_args(), memory, {});
    });
    const int64_t of_dout = bytes_of(group, [&](Collective& own, int q, Workspace memory) {
      CollectiveCase& r = ranks[size_t(q)];
      collect_backward(own, {r.dout.view(), r.dy.view(), r.collective_map()}, memory, {});
    });
    const int64_t of_y = bytes_of(group, [&](Collective& own, int q, Workspace memory) {
      CollectiveCase& r = ranks[size_t(q)];
      collect(own, {r.y.view(), r.out.view(), r.collective_map()}, memory, {});
    });
    const bool by_token = p.cross == Crossing::kToken;
    const test::Sent all(p, drawn);
    dropped += test::drop(p, drawn);
    const test::Sent with_room(p, drawn);
    int64_t rows = 0, tokens = 0;
    for (size_t pair = 0; pair < all.rows.size(); ++pair) {
      rows += with_room.rows[pair];
      tokens += std::min(by_token ? all.tokens[pair] : all.rows[pair], with_room.rows[pair]);
    }
    const int64_t counts = 3 * 3 * (7 + 2 + 2 * 3) * 4;
    EXPECT_EQ(of_dispatch, tokens * 16 + rows * (by_token ? 8 : 4) + counts);
    EXPECT_EQ(of_dout, tokens * 16);
    EXPECT_EQ(of_y, rows * 16);
    saved += rows - tokens;
  }
  EXPECT_GT(dropped, 100);
  if (GetParam() == Crossing::kToken)
    EXPECT_GT(saved, 400);
  else
    EXPECT_EQ(saved, 0);
}

TEST_P(Collectives, WriteTailsAsTheProblemSays) {
  ExpertParallelProblem p{
      .tokens = 5, .top_k = 2, .hidden = 3, .experts = 2, .ranks = 2, .rows = 20};
  p.tail = Tail::kZero;
  test::cross_by(p, GetParam());
  CollectiveGroup group(p);
  std::mt19937 random(3);
  std::vector<CollectiveCase> ranks = test::collective_cases(test::random_ranks(p, random));
  for (const std::string& error :
       test::on_ranks(2, [&](int q) { step(group.ranks[size_t(q)], ranks[size_t(q)]); }))
    EXPECT_EQ(error, "");
  for (const CollectiveCase& r : ranks) {
    EXPECT_LT(r.used(), p.rows);
    for (int64_t row = r.used(); row < p.rows; ++row) {
      EXPECT_EQ(r.row_prob.at(row), 0);
      for (int64_t h = 0; h < p.hidden; ++h) {
        EXPECT_EQ(r.rows.at(row, h), 0);
        EXPECT_EQ(r.dy.at(row, h), 0);
      }
    }
  }
}

// Two steps of a layer may be under way at once, each with a map of its own.
TEST_P(Collectives, KeepWhatAnEarlierDispatchIsToCollect) {
  ExpertParallelProblem p{.tokens = 9,
                          .top_k = 3,
                          .hidden = 4,
                          .experts = 2,
                          .ranks = 3,
                          .rows = 81,
                          .dtype = DType::kF32};
  test::cross_by(p, GetParam());
  CollectiveGroup group(p);
  std::mt19937 random(11);
  const std::vector<test::RankCase> drawn = test::random_ranks(p, random);
  const test::RankCase all = test::on_one(p, drawn);
  std::vector<CollectiveCase> ranks = test::collective_cases(drawn),
                              others = test::collective_cases(test::random_ranks(p, random));
  const auto errors = test::on_ranks(p.ranks, [&](int q) {
    Collective& own = group.ranks[size_t(q)];
    CollectiveCase& r = ranks[size_t(q)];
    const test::OwnedWorkspace workspace(own.plan().workspace_bytes);
    dispatch(own, r.collective_dispatch_args(), workspace.get(), {});
    step(own, others[size_t(q)]);
    test::make_y(r, q * p.experts);
    collect(own, {.y = r.y.view(), .out = r.out.view(), .map = r.collective_map()}, workspace.get(),
            {});
    collect_backward(own, {.dout = r.dout.view(), .dy = r.dy.view(), .map = r.collective_map()},
                     workspace.get(), {});
  });
  for (int q = 0; q < p.ranks; ++q) {
    const CollectiveCase& r = ranks[size_t(q)];
    EXPECT_EQ(errors[size_t(q)], "");
    EXPECT_EQ(test::difference(r.dy, all.dy, all.offsets[size_t(q * p.experts)], r.used(), "dy"),
              "");
    EXPECT_EQ(test::difference(r.out, all.out, q * p.tokens, r.tokens(), "out"), "");
  }
}

}  // namespace
