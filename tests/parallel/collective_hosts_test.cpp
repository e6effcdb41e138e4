// Ranks that say they are of several hosts: which bytes go between hosts, and which within one.
#include <gtest/gtest.h>

#include <atomic>
#include <random>

#include "schedule/host_relays.h"
#include "tests/parallel/collective_case.h"
#include "tests/parallel/rank_difference.h"
#include "tests/parallel/sent.h"

using namespace cadre;
using test::CollectiveCase;

namespace {

/// Ranks whose engine counts bytes: of ranks that share a host, and of others.
struct CountedGroup {
  explicit CountedGroup(const ExpertParallelProblem& p)
      : plan(cadre::plan(p, test::rank_device(), "collective")), engine(p.ranks) {
    for (int q = 0; q < p.ranks; ++q) ranks.emplace_back(plan, q, counting(q));
  }

  ExpertParallelPlan plan;
  test::ThreadEngine engine;
  std::vector<Collective> ranks;
  std::atomic<int64_t> within = 0, between = 0, calls = 0;

  /// Bytes of a call of all ranks.
  template <class Call>
  std::pair<int64_t, int64_t> bytes_of(Call&& call) {
    within = between = calls = 0;
    for (const std::string& error : test::on_ranks(plan.problem.ranks, [&](int q) {
           call(ranks[size_t(q)], q, test::OwnedWorkspace(plan.workspace_bytes).get());
         }))
      EXPECT_EQ(error, "");
    return {within, between};
  }

 private:
  AllToAll counting(int q) {
    return [this, q, all_to_all = engine.of(q)](std::span<const RankMessage> messages, Stream on) {
      const int each = plan.problem.host_ranks;
      for (size_t i = 0; i < messages.size(); ++i) {
        const int to = int(i % ranks.size());
        (to / each == q / each ? within : between) += messages[i].send_bytes;
      }
      calls += q == 0;
      all_to_all(messages, on);
    };
  }
};

// A token crosses once to a host, though its ranks are several; there it goes once to each of them,
// where no more tokens come than rows with room. Numbers and words are of dispatch alone.
TEST(CollectiveHosts, HaveATokenOnce) {
  std::mt19937 random(5);
  int64_t saved = 0, cut = 0;
  for (int i = 0; i < 24; ++i) {
    ExpertParallelProblem p{.tokens = 12, .top_k = 4, .hidden = 8, .experts = 2};
    p.ranks = 3 + i % 3;
    p.rows = i % 2 == 0 ? p.ranks * 48 : int64_t(random() % 60);
    p.overflow = Overflow::kDrop;
    p.cross = Crossing::kHost, p.host_ranks = 2 + i % 2 * (p.ranks > 3);
    p.prob = i % 4 < 2;
    CountedGroup group(p);
    ASSERT_TRUE(group.plan.by_host);
    std::vector<test::RankCase> drawn = test::random_ranks(p, random);
    std::vector<CollectiveCase> ranks = test::collective_cases(drawn);
    const auto of_dispatch = group.bytes_of([&](Collective& own, int q, Workspace memory) {
      dispatch(own, ranks[size_t(q)].collective_dispatch_args(), memory, {});
    });
    const auto [within, between] = group.bytes_of([&](Collective& own, int q, Workspace memory) {
      CollectiveCase& r = ranks[size_t(q)];
      collect_backward(own, {r.dout.view(), r.dy.view(), r.collective_map()}, memory, {});
    });
    EXPECT_EQ(group.calls, 1 + (schedule::HostRelays{p.ranks, p.host_ranks}).rounds());
    const test::Sent all(p, drawn), at_hosts(p, drawn, p.host_ranks);
    test::drop(p, drawn);
    const test::Sent with_room(p, drawn);
    int64_t own_tokens = 0, passed = 0, told = 0, rows = 0;
    for (const int64_t tokens : at_hosts.tokens) own_tokens += tokens;
    for (size_t pair = 0; pair < all.rows.size(); ++pair) {
      passed += std::min(all.tokens[pair], with_room.rows[pair]);
      told += all.tokens[pair];
      rows += with_room.rows[pair];
    }
    const int64_t row = 16;
    EXPECT_EQ(between, at_hosts.others * row);
    EXPECT_EQ(within, (own_tokens - at_hosts.others + passed) * row);
    const int64_t counts = int64_t(p.ranks) * p.ranks * (p.ranks * 2 + 1 + 2 + 2 * p.ranks);
    EXPECT_EQ(of_dispatch.first + of_dispatch.second,
              within + between + (counts + told + rows * (p.prob ? 2 : 1)) * 4);
    saved += all.others - at_hosts.others;
    cut += told - passed;
  }
  EXPECT_GT(saved, 200);
  EXPECT_GT(cut, 40);
}

// One host, and hosts of one rank, say nothing that ranks do not.
TEST(CollectiveHosts, AreRanksWhereTheySayNothing) {
  ExpertParallelProblem p{.tokens = 5, .top_k = 2, .hidden = 3, .experts = 2, .ranks = 3};
  p.rows = 30;
  p.cross = Crossing::kToken;
  const ExpertParallelPlan by_token = plan(p, this_cpu(), "collective");
  EXPECT_EQ(by_token.passing, 0);
  p.cross = Crossing::kHost;
  for (const int each : {1, 3}) {
    p.host_ranks = each;
    const ExpertParallelPlan made = plan(p, this_cpu(), "collective");
    EXPECT_FALSE(made.by_host);
    EXPECT_TRUE(made.by_token);
    EXPECT_EQ(made.workspace_bytes, by_token.workspace_bytes);
    EXPECT_EQ(made.counts, by_token.counts);
    EXPECT_EQ(made.passing, 0);
  }
  p.host_ranks = 2;
  const ExpertParallelPlan made = plan(p, this_cpu(), "collective");
  EXPECT_TRUE(made.by_host && made.by_token);
  EXPECT_EQ(made.counts, by_token.counts + 3 * 3 + 1 + 3 * 2 * 3);  // three rounds at the last host
  EXPECT_EQ(made.passing, 3 * (2 + 10));
}

}  // namespace
