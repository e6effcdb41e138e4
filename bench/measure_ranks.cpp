#include "bench/measure_ranks.h"

#include <algorithm>
#include <array>

#include "bench/check_ranks.h"
#include "bench/device_peer.h"
#include "bench/peer.h"
#include "bench/rank_case.h"
#include "bench/ranks.h"
#include "cadre/error.h"

namespace cadre::bench {
namespace {

constexpr int64_t kCheckedTokens = 64;
constexpr std::array<std::string_view, 2> kCalls = {"dispatch", "collect"};
constexpr size_t kContestants = 4;  // ours, a copy, and on GPUs the DMA engine and ours in a graph
constexpr int kInGraph = 20;        // exchanges, since a graph's launch takes long

/// Times that a rank hands to the process that started it.
struct Times {
  struct One {
    Quantiles us;
    double speed;
  };
  One of[kCalls.size()][kContestants];
};

/// Of a contestant that makes so many at once.
Times::One per_exchange(const Timing& t, double count) {
  return {{t.us.p10 / count, t.us.median / count, t.us.p90 / count}, t.speed / count};
}

CheckReport check_small(const ExpertParallelPlan& plan, const MeasureOptions& options) {
  const ExpertParallelProblem& p = plan.problem;
  ExpertParallelProblem small = p;
  small.tokens = std::min(p.tokens, kCheckedTokens);
  small.rows = std::min(p.rows, p.ranks * small.tokens * p.top_k);
  return check_ranks(to_string(small), options.draw, options.device, plan.name).check;
}

/// Of a row as a call moves it.
int64_t row_bytes(size_t call, const ExpertParallelProblem& p) {
  return call == 0 ? dispatched_bytes(p) : bytes_for(p.dtype, p.hidden);
}

/// Rows where they belong, of all ranks.
double delivered(size_t call, const ExpertParallelProblem& p, const RankRouting& routing) {
  return double(routing.rows(p, false)) * double(row_bytes(call, p));
}

/// What ranks take from others, all of them together.
int64_t crossing(size_t call, const ExpertParallelProblem& p, const RankRouting& routing) {
  const bool by_token = call == 0 || p.sum == RowSum::kRank;
  return (by_token ? routing.tokens_of_ranks(p, true) : routing.rows(p, true)) * row_bytes(call, p);
}

/// Of all ranks, read and written at the least: dispatch writes what it reads, collect sums, and
/// with sum=rank writes and reads what each rank sums.
double bytes_of(size_t call, const ExpertParallelProblem& p, const RankRouting& routing) {
  const double rows = delivered(call, p, routing);
  if (call == 0) return rows + rows;
  int64_t sums = p.ranks * p.tokens;
  if (p.sum == RowSum::kRank) sums += 2 * routing.tokens_of_ranks(p, false);
  return rows + double(bytes_for(p.dtype, sums * p.hidden));
}

/// One rank, as it is timed.
class TimedRank {
 public:
  TimedRank(Rank& rank, const ExpertParallelPlan& plan, const RankRouting& routing,
            const RankInputs& inputs)
      : rank_(rank),
        accelerator_(open_accelerator(plan.device)),
        mine_(plan, inputs, rank.number() * plan.problem.tokens, own_, accelerator_.get()) {
    mine_.choose(routing.experts.data(), routing.tokens[size_t(rank.number())]);
  }

  void run(const RankRouting& routing, const MeasureOptions& options, Times& times) {
    const ExpertParallelProblem& p = mine_.plan().problem;
    rank_.enter("making the window");
    Window window = Window::create(mine_.plan(), rank_.number(), rank_.all_gather());
    mine_.step(window, [&](std::string_view phase) { rank_.enter(phase); });
    rank_.enter("the check of the window");
    window.check();
    if (accelerator_) mine_.move_into(window);
    for (size_t call = 0; call < kCalls.size(); ++call) {
      rank_.enter(kCalls[call]);
      std::vector<Peer> contestants;
      const auto exchange = [&, call] {
        call == 0 ? mine_.dispatch(window) : mine_.collect(window);
      };
      contestants.push_back({"cadre", std::string(mine_.plan().name), exchange});
      add_copy(bytes_of(call, p, routing) / p.ranks, contestants);
      if (accelerator_) {
        add_dma_engine(window, crossing(call, p, routing) / p.ranks, contestants);
        add_graph(exchange, contestants);
      }
      const std::vector<Timing> timings = time(contestants, options);
      for (size_t j = 0; j < timings.size(); ++j)
        times.of[call][j] = per_exchange(timings[j], j == kContestants - 1 ? kInGraph : 1);
    }
    rank_.meet();  // nobody's window ends while others read it
  }

 private:
  void add_copy(double bytes, std::vector<Peer>& contestants) {
    const Work work{.bytes = bytes};
    const std::vector<Peer> copies =
        accelerator_ ? device_copy_peer(work, *accelerator_).list : copy_peer(work);
    contestants.insert(contestants.end(), copies.begin(), copies.end());
  }

  /// What crosses, by the DMA engines of all ranks at once.
  void add_dma_engine(const Window& window, int64_t bytes, std::vector<Peer>& contestants) {
    const int next = (window.rank() + 1) % mine_.plan().problem.ranks;
    const WindowLayout& at = mine_.plan().window;
    char* here = static_cast<char*>(window.tokens(mine_.plan()).data) + at.rows - at.tokens;
    const char* there = here + (next - window.rank()) * window.bytes();
    contestants.push_back(
        {"dma_engine", "", [this, here, there, bytes] { accelerator_->copy(here, there, bytes); }});
  }

  /// The same from a graph. While a thread records, others must not take memory.
  void add_graph(const std::function<void()>& exchange, std::vector<Peer>& contestants) {
    for (int turn = 0; turn < mine_.plan().problem.ranks; ++turn) {
      rank_.meet();
      if (turn == rank_.number())
        contestants.push_back({"cadre_graph", "", accelerator_->record([&] {
                                 for (int i = 0; i < kInGraph; ++i) exchange();
                               })});
    }
    rank_.meet();
  }

  /// On the CPU a launch ends when all ranks are through, so that all see the same times. On GPUs
  /// all ranks launch as often: what seconds say elsewhere rank 0 says in launches here.
  std::vector<Timing> time(std::vector<Peer>& contestants, const MeasureOptions& options) {
    if (!accelerator_) {
      for (Peer& contestant : contestants)
        contestant.run = [this, run = contestant.run] {
          run();
          rank_.meet();
        };
      return contest({contestants}, options.contest, nullptr);
    }
    constexpr int kFirst = 20;
    ContestOptions few = options.contest;
    few.repeat = kFirst, few.load_s = 0;
    const double us = contest({contestants}, few, accelerator_.get())[0].us.median;
    const auto launches = int64_t(options.contest.load_s * 1e6 / std::max(us, 1.0));
    const int64_t agreed = std::stoll(rank_.all_gather()(std::to_string(launches))[0]);
    for (int64_t i = 0; i < agreed; ++i) contestants[0].run();
    few.repeat = options.contest.repeat;
    return contest({contestants}, few, accelerator_.get());
  }

  Rank& rank_;
  std::unique_ptr<Accelerator> accelerator_;
  Buffers own_;
  RankCase mine_;
};

Times run_timed(const ExpertParallelPlan& plan, const RankRouting& routing,
                const MeasureOptions& options) {
  const ExpertParallelProblem& p = plan.problem;
  Buffers inputs_of_all, shared{Buffers::ForProcesses{}};
  const RankInputs inputs(p, options.draw.seed, inputs_of_all);
  Times* times = shared.array<Times>(p.ranks);
  run_ranks_on(plan.device, p.ranks, [&](Rank& rank) {
    const int q = rank.number();
    const ExpertParallelPlan mine =
        cadre::plan(p, device_of_rank(plan.device, q, p.ranks), plan.name);
    TimedRank(rank, mine, routing, inputs).run(routing, options, times[q]);
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
  m.check = check_small(chosen, options);
  m.checked_rows = std::min(p.tokens, kCheckedTokens);
  if (!m.check.good()) return {m};
  const RankRouting routing = drawn_routing(p, options.draw);
  const Times times = run_timed(chosen, routing, options);
  std::vector<Measurement> all;
  for (size_t call = 0; call < kCalls.size(); ++call) {
    Measurement& one = all.emplace_back(m);
    one.call = kCalls[call];
    one.bytes = bytes_of(call, p, routing);
    one.delivered_bytes = delivered(call, p, routing);
    one.crossed_bytes = double(crossing(call, p, routing));
    const auto& [ours, copy, engine, graph] = times.of[call];
    one.timings = {{"cadre", m.plan, ours.us, ours.speed},
                   {"copy", text("a copy of ", int64_t(one.bytes / 2), " bytes by all ranks"),
                    copy.us, copy.speed}};
    if (chosen.device.kind == DeviceKind::kCpu) continue;
    const int64_t of_rank = crossing(call, p, routing) / p.ranks;
    one.timings.push_back(
        {"dma_engine", text(of_rank, " bytes to each rank from another"), engine.us, engine.speed});
    one.timings.push_back(
        {"cadre_graph", text("one of ", kInGraph, " in a CUDA graph"), graph.us, graph.speed});
  }
  return all;
}

}  // namespace cadre::bench
