#include "bench/measure_ranks.h"

#include <algorithm>
#include <array>

#include "bench/check_ranks.h"
#include "bench/peer.h"
#include "bench/rank_case.h"
#include "bench/ranks.h"
#include "cadre/error.h"

namespace cadre::bench {
namespace {

constexpr int64_t kCheckedTokens = 64;
constexpr std::array<std::string_view, 2> kCalls = {"dispatch", "collect"};
constexpr size_t kContestants = 2;  // ours and a copy

/// Times that a rank hands to the process that started it.
struct Times {
  struct {
    Quantiles us;
    double speed;
  } of[kCalls.size()][kContestants];
};

CheckReport check_small(const ExpertParallelProblem& p, const MeasureOptions& options) {
  ExpertParallelProblem small = p;
  small.tokens = std::min(p.tokens, kCheckedTokens);
  small.rows = std::min(p.rows, p.ranks * small.tokens * p.top_k);
  return check_ranks(to_string(small), options.draw, options.device).check;
}

/// Of all ranks, read and written at the least: dispatch writes what it reads, collect sums.
double bytes_of(size_t call, const Measurement& m, const ExpertParallelProblem& p) {
  const auto sums = double(bytes_for(p.dtype, p.ranks * p.tokens * p.hidden));
  return m.delivered_bytes + (call == 0 ? m.delivered_bytes : sums);
}

/// One rank: a launch ends when all ranks are through, so that all see the same times.
void time_calls(Rank& rank, RankCase& mine, const Measurement& m, const MeasureOptions& options,
                Times& times) {
  const ExpertParallelProblem& p = mine.plan().problem;
  rank.enter("making the window");
  Window window = Window::create(mine.plan(), rank.number(), rank.all_gather());
  mine.step(window, [&](std::string_view phase) { rank.enter(phase); });
  rank.enter("the check of the window");
  window.check();
  for (size_t call = 0; call < kCalls.size(); ++call) {
    rank.enter(kCalls[call]);
    std::vector<Peer> contestants = copy_peer({.bytes = bytes_of(call, m, p) / p.ranks});
    const auto ours = [&, call] { call == 0 ? mine.dispatch(window) : mine.collect(window); };
    contestants.insert(contestants.begin(), {"cadre", std::string(mine.plan().name), ours});
    for (Peer& contestant : contestants)
      contestant.run = [&rank, run = contestant.run] {
        run();
        rank.meet();
      };
    const std::vector<Timing> timings = contest({contestants}, options.contest, nullptr);
    for (size_t j = 0; j < kContestants; ++j) times.of[call][j] = {timings[j].us, timings[j].speed};
  }
}

Times run_timed(const ExpertParallelPlan& plan, const RankRouting& routing, const Measurement& m,
                const MeasureOptions& options) {
  const ExpertParallelProblem& p = plan.problem;
  Buffers inputs_of_all, shared{Buffers::ForProcesses{}};
  const RankInputs inputs(p, options.draw.seed, inputs_of_all);
  Times* times = shared.array<Times>(p.ranks);
  run_ranks(p.ranks, [&](Rank& rank) {
    const int q = rank.number();
    Buffers own;
    RankCase mine(plan, inputs, q * p.tokens, own);
    mine.choose(routing.experts.data(), routing.tokens[size_t(q)]);
    time_calls(rank, mine, m, options, times[q]);
    return std::string();
  });
  return times[0];
}

}  // namespace

std::vector<Measurement> measure_ranks(std::string_view words, const MeasureOptions& options) {
  const ExpertParallelPlan chosen =
      plan(parse_expert_parallel_problem(words), options.device, options.only);
  const ExpertParallelProblem& p = chosen.problem;
  Measurement m;
  m.problem = to_string(p);
  m.plan = chosen.name;
  m.check = check_small(p, options);
  m.checked_rows = std::min(p.tokens, kCheckedTokens);
  if (!m.check.good()) return {m};
  const RankRouting routing = drawn_routing(p, options.draw);
  const auto row = double(bytes_for(p.dtype, p.hidden));
  m.delivered_bytes = double(routing.rows(p, false)) * row;
  m.crossed_bytes = double(routing.rows(p, true)) * row;
  const Times times = run_timed(chosen, routing, m, options);
  std::vector<Measurement> all;
  for (size_t call = 0; call < kCalls.size(); ++call) {
    Measurement& one = all.emplace_back(m);
    one.call = kCalls[call];
    one.bytes = bytes_of(call, m, p);
    const auto& [ours, copy] = times.of[call];
    one.timings = {{"cadre", m.plan, ours.us, ours.speed},
                   {"copy", text("a copy of ", int64_t(one.bytes / 2), " bytes by all ranks"),
                    copy.us, copy.speed}};
  }
  return all;
}

}  // namespace cadre::bench
