// Ranks in processes of their own whose rows travel by mailboxes: what they compute, what is timed
// of them, and what mailboxes refuse.
#include <gtest/gtest.h>

#include "bench/check_ranks.h"
#include "bench/cost.h"
#include "bench/mailboxes.h"
#include "bench/measure_ranks.h"
#include "bench/rank_routing.h"
#include "bench/ranks.h"
#include "cadre/error.h"
#include "tests/judge/errors.h"

using namespace cadre;
using bench::Rank;

namespace {

bench::RanksReport checked(std::string_view words) {
  return bench::check_ranks(words, {}, this_cpu(), "collective");
}

TEST(CheckCollective, HasTheBitsOfOneRankInEveryRouting) {
  for (const std::string_view words :
       {"expert_parallel T=13 top_k=3 H=9 E=3 ranks=1 R=39 dtype=f32",
        "expert_parallel T=13 top_k=3 H=9 E=3 ranks=2 R=78 dtype=bf16",
        "expert_parallel T=5 top_k=2 H=17 E=2 ranks=3 R=30 dtype=f16 prob=no tail=zero",
        "expert_parallel T=0 top_k=2 H=3 E=2 ranks=2 R=4",
        "expert_parallel T=13 top_k=3 H=9 E=3 ranks=3 R=20 overflow=drop",
        "expert_parallel T=13 top_k=3 H=9 E=3 ranks=3 R=117 dtype=f32 cross=token",
        "expert_parallel T=13 top_k=3 H=9 E=3 ranks=3 R=20 overflow=drop cross=token",
        "expert_parallel T=13 top_k=3 H=9 E=3 ranks=2 R=78 cross=host host_ranks=1",
        "expert_parallel T=13 top_k=3 H=9 E=3 ranks=3 R=117 dtype=f32 cross=host host_ranks=2",
        "expert_parallel T=13 top_k=4 H=9 E=3 ranks=4 R=208 prob=no cross=host host_ranks=2",
        "expert_parallel T=13 top_k=3 H=9 E=3 ranks=4 R=20 overflow=drop cross=host host_ranks=3",
        "expert_parallel T=13 top_k=3 H=9 E=3 ranks=3 R=117 dtype=f32 cross=choice",
        "expert_parallel T=0 top_k=2 H=3 E=2 ranks=2 R=4 cross=token",
        "expert_parallel T=0 top_k=2 H=3 E=2 ranks=3 R=4 cross=host host_ranks=2",
        "expert_parallel T=13 top_k=3 H=9 E=3 ranks=2 block=39 dtype=f32",
        "expert_parallel T=5 top_k=2 H=17 E=2 ranks=3 block=10 prob=no",
        "expert_parallel T=13 top_k=3 H=9 E=3 ranks=3 block=10 overflow=drop",
        "expert_parallel T=13 top_k=3 H=9 E=3 ranks=3 block=12 R=20 overflow=drop"}) {
    const bench::RanksReport report = checked(words);
    EXPECT_EQ(report.check.fault, "") << words;
    EXPECT_EQ(report.check.plan, "collective");
    EXPECT_EQ(report.routings, 6);
    EXPECT_EQ(report.overflows, 0);
  }
}

// All rows on one rank, and all to one expert, are too many for R, and, of each rank, for a block.
TEST(CheckCollective, SeesThatRowsWithoutRoomAreAnErrorOnEveryRank) {
  for (const std::string_view words :
       {"expert_parallel T=8 top_k=2 H=5 E=2 ranks=2 R=20",
        "expert_parallel T=8 top_k=2 H=5 E=2 ranks=2 R=20 cross=token",
        "expert_parallel T=8 top_k=2 H=5 E=2 ranks=4 R=40 cross=host host_ranks=2",
        "expert_parallel T=8 top_k=2 H=5 E=2 ranks=2 block=13",
        "expert_parallel T=8 top_k=2 H=5 E=2 ranks=2 block=16 R=20"}) {
    const bench::RanksReport report = checked(words);
    EXPECT_EQ(report.check.fault, "") << words;
    EXPECT_EQ(report.overflows, 2) << words;
  }
}

// What was computed is that of windows.
TEST(CheckCollective, HasTheDigestOfWindows) {
  constexpr std::string_view kWords = "expert_parallel T=13 top_k=3 H=9 E=3 ranks=3 R=117";
  const std::string want = bench::check_ranks(kWords, {}).check.digest.text();
  EXPECT_EQ(checked(kWords).check.digest.text(), want);
  EXPECT_EQ(checked(text(kWords, " cross=token")).check.digest.text(), want);
  EXPECT_EQ(checked(text(kWords, " cross=host host_ranks=2")).check.digest.text(), want);
  EXPECT_EQ(checked(text(kWords, " block=39")).check.digest.text(), want);
}

TEST(CheckCollective, RefusesWhatItsPlanRefuses) {
  const auto refusal = [](std::string_view words) {
    return test::unsupported([&] { checked(text("expert_parallel T=8 H=64 ranks=2 ", words)); });
  };
  EXPECT_EQ(refusal("x=mxfp8").find("expert_parallel: no route takes it on cpu\n  collective: "
                                    "moves no codes ["),
            0u);
  EXPECT_NE(refusal("push=yes").find("collective: has no window to push into"), std::string::npos);
  EXPECT_NE(refusal("sum=rank").find("collective: sums no rows at home"), std::string::npos);
}

// Blocks, and more ranks than have windows, have no plan by any other route.
TEST(CheckCollective, IsEstimatedAsItIsPlanned) {
  for (const std::string_view words : {"expert_parallel T=8 top_k=2 H=5 E=2 ranks=2 block=16",
                                       "expert_parallel T=8 top_k=2 H=5 E=2 ranks=65 R=20"}) {
    EXPECT_GT(bench::seconds_to_check(words, "collective"), 0);
    EXPECT_ANY_THROW(bench::seconds_to_check(words));
    bench::MeasureOptions options;
    options.only = "collective";
    EXPECT_GT(bench::seconds_to_measure(words, options), 0);
  }
}

// Of few tokens a row crosses for each choice, both ways.
TEST(MeasureCollective, StatesWhatIsDeliveredAndWhatCrosses) {
  bench::MeasureOptions options;
  options.contest.repeat = 2;
  options.only = "collective";
  for (const std::string_view words : {"", " block=256"}) {
    const auto all = bench::measure_ranks(
        text("expert_parallel T=64 top_k=4 H=8 E=2 ranks=2 R=512 dtype=f32", words), options);
    ASSERT_EQ(all.size(), 2u);
    const ExpertParallelProblem p = parse_expert_parallel_problem(all[0].problem);
    const bench::RankRouting routing = bench::drawn_routing(p, options.draw);
    for (const bench::Measurement& m : all) {
      EXPECT_TRUE(m.check.good()) << m.check.fault;
      EXPECT_EQ(m.plan, "collective");
      EXPECT_EQ(m.checked_rows, 64);
      EXPECT_EQ(m.delivered_bytes, double(routing.rows(p, false)) * 32);
      EXPECT_EQ(m.crossed_bytes, double(routing.rows(p, true)) * 32);
      ASSERT_EQ(m.timings.size(), 2u);
      EXPECT_EQ(m.timings[0].name + m.timings[1].name, "cadrecopy");
      for (const bench::Timing& t : m.timings) EXPECT_GT(t.us.median, 0);
    }
    EXPECT_EQ(all[0].call + all[1].call, "dispatchcollect");
    EXPECT_EQ(all[0].bytes, 2 * all[0].delivered_bytes);
  }
}

// Of dispatch a token crosses once, also where rows have no room.
TEST(MeasureCollective, StatesTokensThatCrossOnce) {
  bench::MeasureOptions options;
  options.contest.repeat = 1;
  options.only = "collective";
  for (const std::string_view words : {"R=512", "R=20 overflow=drop"}) {
    const auto all = bench::measure_ranks(
        text("expert_parallel T=64 top_k=4 H=8 E=2 ranks=2 dtype=f32 cross=token ", words),
        options);
    ASSERT_EQ(all.size(), 2u);
    EXPECT_TRUE(all[0].check.good()) << all[0].check.fault;
    const ExpertParallelProblem p = parse_expert_parallel_problem(all[0].problem);
    const bench::RankRouting routing = bench::drawn_routing(p, options.draw);
    const int64_t rows = routing.rows(p, true);
    EXPECT_EQ(all[0].crossed_bytes, double(routing.tokens_sent(p)) * 32);
    EXPECT_EQ(all[1].crossed_bytes, double(rows) * 32);
    if (p.overflow == Overflow::kError)
      EXPECT_EQ(routing.tokens_sent(p), routing.tokens_of_ranks(p, true));
    else
      EXPECT_EQ(routing.tokens_sent(p), rows);
    EXPECT_LE(routing.tokens_sent(p), rows);
  }
}

// Between hosts a token crosses once, and within one to each rank that has not had it so.
TEST(MeasureCollective, StatesTokensThatCrossByHost) {
  bench::MeasureOptions options;
  options.contest.repeat = 1;
  options.only = "collective";
  const auto all = bench::measure_ranks(
      "expert_parallel T=32 top_k=6 H=8 E=2 ranks=3 R=576 dtype=f32 cross=host host_ranks=2",
      options);
  ASSERT_EQ(all.size(), 2u);
  EXPECT_TRUE(all[0].check.good()) << all[0].check.fault;
  EXPECT_NE(all[0].check.problem.find("cross=host host_ranks=2"), std::string::npos);
  const ExpertParallelProblem p = parse_expert_parallel_problem(all[0].problem);
  const bench::RankRouting routing = bench::drawn_routing(p, options.draw);
  int64_t moved = 0;
  for (int64_t t = 0; t < 3 * 32; ++t) {
    std::array<bool, 3> has{};
    for (int64_t j = 0; j < 6; ++j) has[size_t(routing.experts[size_t(t * 6 + j)] / 2)] = true;
    if (t < 32) moved += has[1] + has[2];
    if (t >= 32 && t < 64) moved += has[0] + has[2];
    if (t >= 64) moved += (has[0] || has[1]) + has[1];  // to rank 0, and from there to rank 1
  }
  EXPECT_EQ(all[0].crossed_bytes, double(moved) * 32);
  EXPECT_EQ(all[1].crossed_bytes, double(routing.rows(p, true)) * 32);
}

// Many tokens cross once, and so do the few that are checked before.
TEST(MeasureCollective, ChecksWhatItTimes) {
  bench::MeasureOptions options;
  options.contest.repeat = 1;
  options.only = "collective";
  const auto all =
      bench::measure_ranks("expert_parallel T=2048 top_k=4 H=1024 E=2 ranks=2 R=16384", options);
  EXPECT_TRUE(all[0].check.good()) << all[0].check.fault;
  EXPECT_NE(
      all[0].check.problem.find("T=64 top_k=4 H=1024 E=2 ranks=2 R=512 dtype=bf16 cross=token"),
      std::string::npos)
      << all[0].check.problem;
  EXPECT_LT(all[0].crossed_bytes, all[1].crossed_bytes);
}

// What is checked first is smaller, and so are its blocks.
TEST(MeasureCollective, ChecksFewTokensBefore) {
  bench::MeasureOptions options;
  options.contest.repeat = 1;
  options.only = "collective";
  const auto all = bench::measure_ranks(
      "expert_parallel T=100 top_k=2 H=8 E=2 ranks=2 block=200 dtype=f32", options);
  EXPECT_TRUE(all[0].check.good()) << all[0].check.fault;
  EXPECT_NE(all[0].check.problem.find("T=64 top_k=2 H=8 E=2 ranks=2 block=128 R=256"),
            std::string::npos)
      << all[0].check.problem;
}

/// What a rank throws of three that exchange once, each `bytes(from, to)` with another; empty if
/// what comes is what was sent.
template <class Bytes>
std::string error_of_messages(int64_t room, Bytes&& bytes, int64_t more_of_last = 0) {
  bench::Mailboxes mailboxes(3, room);
  const auto letter = [](int from, int to) { return char('a' + 3 * from + to); };
  try {
    for (const std::string& difference : bench::run_ranks(3, [&](Rank& rank) {
           rank.enter("the exchange");
           const int own = rank.number();
           std::vector<std::string> sent, want, got;
           for (int q = 0; q < 3; ++q) {
             sent.emplace_back(bytes(own, q), letter(own, q));
             want.emplace_back(bytes(q, own) + (own == 2 ? more_of_last : 0), letter(q, own));
             got.emplace_back(want.back().size(), '?');
           }
           std::vector<RankMessage> messages;
           for (size_t q = 0; q < 3; ++q)
             messages.push_back(
                 {sent[q].data(), int64_t(sent[q].size()), got[q].data(), int64_t(got[q].size())});
           mailboxes.of(rank)(messages, {});
           return got == want ? std::string() : got[0] + got[1] + got[2];
         }))
      if (!difference.empty()) return difference;
  } catch (const DeviceError& error) {
    return error.what();
  }
  return {};
}

TEST(Mailboxes, BringEachRankWhatWasSentToIt) {
  const auto bytes = [](int from, int to) { return size_t(from * 2 + to * 3) % 4; };
  EXPECT_EQ(error_of_messages(9, bytes), "");
}

TEST(Mailboxes, SayWhichRankSendsMoreThanTheyHold) {
  const auto bytes = [](int from, int) { return size_t(from == 1 ? 3 : 2); };
  EXPECT_EQ(error_of_messages(9, bytes), "");
  EXPECT_EQ(error_of_messages(8, bytes),
            "expert_parallel: rank 1 failed in the exchange: mailbox: messages of rank 1 have 9 "
            "bytes, must have at most 8");
}

TEST(Mailboxes, SayWhichRankSendsAnotherSize) {
  EXPECT_EQ(error_of_messages(
                9, [](int, int) { return size_t(2); }, 1),
            "expert_parallel: rank 2 failed in the exchange: mailbox: rank 0 sends 2 bytes, must "
            "send 3, which rank 2 receives");
}

}  // namespace
