// Ranks in processes of their own: what they compute, and what is said when one fails.
#include "bench/ranks.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "bench/check_ranks.h"
#include "bench/measure_ranks.h"
#include "bench/rank_case.h"
#include "cadre/error.h"

using namespace cadre;
using bench::Rank;

namespace {

/// What run_ranks throws; empty if nothing.
std::string error_of(int ranks, const std::function<std::string(Rank&)>& work) {
  try {
    bench::run_ranks(ranks, work);
  } catch (const DeviceError& error) {
    return error.what();
  }
  return {};
}

size_t open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return size_t(std::distance(begin(files), end(files)));
}

TEST(Ranks, ReturnWordsAndGatherThem) {
  const auto words = bench::run_ranks(3, [](Rank& rank) {
    const AllGather gather = rank.all_gather();
    std::string all;
    for (int round = 0; round < 50; ++round) {
      all.clear();
      for (const std::string& one : gather(text(rank.number(), "+", round, " "))) all += one;
    }
    return all + std::to_string(rank.number());
  });
  EXPECT_EQ(words,
            (std::vector<std::string>{"0+49 1+49 2+49 0", "0+49 1+49 2+49 1", "0+49 1+49 2+49 2"}));
}

/// A step of two ranks, of which the second calls `fail` where a phase begins.
template <class Fail>
std::string error_of_a_step(std::string_view failing, Fail&& fail) {
  const ExpertParallelPlan plan =
      cadre::plan(parse_expert_parallel_problem("expert_parallel T=4 top_k=2 H=3 E=2 ranks=2 R=16"),
                  this_cpu());
  bench::Buffers buffers;
  const bench::RankInputs inputs(plan.problem, 1, buffers);
  const bench::RankRouting routing = bench::drawn_routing(plan.problem, {});
  return error_of(2, [&](Rank& rank) {
    const auto enter = [&](std::string_view phase) {
      rank.enter(phase);
      if (rank.number() == 1 && phase == failing) fail();
    };
    enter("making the window");
    bench::WindowRoute route(plan, Window::create(plan, rank.number(), rank.all_gather()));
    bench::Buffers own;
    bench::RankCase mine(plan, inputs, rank.number() * plan.problem.tokens, own);
    mine.choose(routing.experts.data(), plan.problem.tokens);
    mine.step(route, enter);
    return std::string();
  });
}

constexpr std::array<std::string_view, 7> kPhases = {
    "making the window",     "dispatch",         "the experts", "collect", "collect backward",
    "the experts' backward", "dispatch backward"};

// The limit of the window is a minute, which nobody waits for.
TEST(Ranks, OfWhichOneIsKilledAreEndedAndItIsNamed) {
  const size_t files = open_files();
  for (const std::string_view phase : kPhases) {
    EXPECT_EQ(error_of_a_step(phase, [] { std::raise(SIGKILL); }),
              text("expert_parallel: rank 1 was killed by signal 9 in ", phase,
                   "; the other ranks were ended"));
    EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
    EXPECT_EQ(open_files(), files);
  }
}

TEST(Ranks, OfWhichOneThrowsAreEndedAndItIsNamed) {
  const size_t files = open_files();
  for (const std::string_view phase : kPhases) {
    EXPECT_EQ(error_of_a_step(phase, [] { throw std::runtime_error("too tired"); }),
              text("expert_parallel: rank 1 failed in ", phase, ": too tired"));
    EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
    EXPECT_EQ(open_files(), files);
  }
  EXPECT_EQ(error_of_a_step("nothing", [] {}), "");
}

TEST(Ranks, ThatDoNotComeAreNamedByThoseThatWait) {
  const std::string error = error_of(2, [](Rank& rank) {
    rank.enter("waiting");
    const auto plan = cadre::plan(
        parse_expert_parallel_problem("expert_parallel T=1 top_k=1 H=1 E=1 ranks=2 R=2"),
        this_cpu());
    bench::WindowRoute route(plan, Window::create(plan, rank.number(), rank.all_gather(),
                                                  {.limit = std::chrono::milliseconds(200)}));
    if (rank.number() == 1) rank.meet();
    bench::Buffers buffers;
    const bench::RankInputs inputs(plan.problem, 1, buffers);
    bench::RankCase mine(plan, inputs, 0, buffers);
    const int32_t nobody = -1;
    mine.choose(&nobody, 1);
    mine.dispatch(route);
    return std::string();
  });
  EXPECT_EQ(error,
            "expert_parallel: rank 0 failed in waiting: expert_parallel: rank 1 has not come to "
            "dispatch, exchange 1, within 200 ms; the window is of no more use");
}

// A user who may have one thread more, and no process.
TEST(Ranks, ThatCannotBeStarted) {
  if (geteuid() != 0) GTEST_SKIP() << "only root may become nobody";
  const pid_t process = fork();
  if (process == 0) {
    const rlimit most{2, 2};
    if (setuid(54321) != 0 || setrlimit(RLIMIT_NPROC, &most) != 0) _exit(2);
    const std::string error = error_of(2, [](Rank&) { return std::string(); });
    _exit(error == "expert_parallel: rank 0 cannot be started: Resource temporarily unavailable"
              ? 0
              : 1);
  }
  int status = 0;
  waitpid(process, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(CheckRanks, HasTheBitsOfOneRankInEveryRouting) {
  for (const std::string_view words :
       {"expert_parallel T=13 top_k=3 H=9 E=3 ranks=1 R=39 dtype=f32",
        "expert_parallel T=13 top_k=3 H=9 E=3 ranks=2 R=78 dtype=bf16",
        "expert_parallel T=5 top_k=2 H=17 E=2 ranks=4 R=40 dtype=f16 prob=no",
        "expert_parallel T=0 top_k=2 H=3 E=2 ranks=2 R=4",
        "expert_parallel T=13 top_k=3 H=9 E=3 ranks=3 R=20 overflow=drop",
        "expert_parallel T=13 top_k=3 H=192 E=3 ranks=2 R=78 x=mxfp8 push=yes",
        "expert_parallel T=13 top_k=3 H=9 E=3 ranks=2 R=78 sum=rank",
        "expert_parallel T=13 top_k=4 H=64 E=3 ranks=3 R=20 overflow=drop x=mxfp8 sum=rank",
        "expert_parallel T=13 top_k=3 H=130 E=3 ranks=3 R=117 dtype=f32 x=fp8_block "
        "scales_major=column",
        "expert_parallel T=13 top_k=3 H=64 E=3 ranks=3 R=20 overflow=drop prob=no x=fp8_row"}) {
    const bench::RanksReport report = bench::check_ranks(words, {});
    EXPECT_EQ(report.check.fault, "") << words;
    EXPECT_EQ(report.routings, 6);
    EXPECT_EQ(report.overflows, 0);
  }
}

TEST(CheckRanks, SeesThatRowsBeyondRAreAnErrorOnEveryRank) {
  const bench::RanksReport report =
      bench::check_ranks("expert_parallel T=8 top_k=2 H=5 E=2 ranks=2 R=20", {});
  EXPECT_EQ(report.check.fault, "");
  EXPECT_EQ(report.overflows, 2);  // all on one rank, all to one expert
  const bench::RanksReport codes =
      bench::check_ranks("expert_parallel T=8 top_k=2 H=64 E=2 ranks=2 R=20 x=mxfp8", {});
  EXPECT_EQ(codes.check.fault, "");
  EXPECT_EQ(codes.overflows, 2);
}

TEST(MeasureRanks, StatesWhatIsDeliveredAndWhatCrosses) {
  bench::MeasureOptions options;
  options.draw.offsets = "onehot";  // the first expert, so rank 0 has all
  options.contest.repeat = 2;
  const auto all =
      bench::measure_ranks("expert_parallel T=64 top_k=1 H=8 E=2 ranks=2 R=128 dtype=f32", options);
  ASSERT_EQ(all.size(), 2u);
  const bench::RankRouting routing =
      bench::drawn_routing(parse_expert_parallel_problem(all[0].problem), options.draw);
  double rows = 0, crossed = 0;
  for (size_t i = 0; i < routing.experts.size(); ++i) {
    rows += routing.experts[i] >= 0;
    crossed += routing.experts[i] >= 0 && (routing.experts[i] / 2 == 1) != (i >= 64);
  }
  EXPECT_GT(crossed, 40);
  for (const bench::Measurement& m : all) {
    EXPECT_TRUE(m.check.good()) << m.check.fault;
    EXPECT_EQ(m.delivered_bytes, rows * 32);
    EXPECT_EQ(m.crossed_bytes, crossed * 32);
    ASSERT_EQ(m.timings.size(), 2u);
    for (const bench::Timing& t : m.timings) EXPECT_GT(t.us.median, 0);
  }
  EXPECT_EQ(all[0].call + all[1].call, "dispatchcollect");
  EXPECT_EQ(all[0].bytes, 2 * rows * 32);
  EXPECT_EQ(all[1].bytes, rows * 32 + 128 * 32);
}

// Of sums of ranks one of a token crosses to its rank, as the token has crossed; each is written,
// and read.
TEST(MeasureRanks, StatesWhatCrossesOfSums) {
  bench::MeasureOptions options;
  options.contest.repeat = 2;
  const auto all = bench::measure_ranks(
      "expert_parallel T=64 top_k=4 H=8 E=2 ranks=2 R=512 dtype=f32 sum=rank", options);
  ASSERT_EQ(all.size(), 2u);
  EXPECT_TRUE(all[1].check.good()) << all[1].check.fault;
  const ExpertParallelProblem p = parse_expert_parallel_problem(all[0].problem);
  const bench::RankRouting routing = bench::drawn_routing(p, options.draw);
  EXPECT_EQ(all[1].crossed_bytes, all[0].crossed_bytes);
  EXPECT_LT(all[1].crossed_bytes, double(routing.rows(p, true)) * 32);
  EXPECT_EQ(all[1].bytes,
            double(routing.rows(p, false) + 2 * routing.tokens_of_ranks(p, false) + 128) * 32);
}

// Of codes a token is a byte a number, and its scales.
TEST(MeasureRanks, StatesWhatCrossesOfCodes) {
  bench::MeasureOptions options;
  options.contest.repeat = 2;
  const auto of = [&](std::string_view x) {
    return bench::measure_ranks(
        text("expert_parallel T=64 top_k=2 H=256 E=2 ranks=2 R=256 dtype=f32", x), options);
  };
  const auto numbers = of(""), codes = of(" x=mxfp8"), blocks = of(" x=fp8_block");
  EXPECT_TRUE(codes[0].check.good()) << codes[0].check.fault;
  EXPECT_EQ(codes[0].crossed_bytes, numbers[0].crossed_bytes / 1024 * (256 + 8));
  EXPECT_EQ(blocks[0].delivered_bytes, numbers[0].delivered_bytes / 1024 * (256 + 8));
  EXPECT_EQ(codes[0].bytes, 2 * codes[0].delivered_bytes);
  for (const auto& measured : {codes, blocks}) {
    EXPECT_EQ(measured[1].crossed_bytes, numbers[1].crossed_bytes);
    EXPECT_EQ(measured[1].bytes, numbers[1].bytes);
  }
}

}  // namespace
