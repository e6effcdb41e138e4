#include "bench/measure_ranks.h"

#include <algorithm>
#include <array>

#include "bench/check_ranks.h"
#include "bench/device_peer.h"
#include "bench/peer.h"
#include "bench/rank_case.h"
#include "bench/rank_route.h"
#include "bench/ranks.h"
#include "cadre/error.h"

namespace cadre::bench {
namespace {

constexpr int64_t kCheckedTokens = 64;
constexpr std::array<std::string_view, 2> kCalls = {"dispatch", "collect"};
constexpr size_t kContestants = 4;  // ours, a copy, and on GPUs the DMA engine and ours in a graph
constexpr int kInGraph = 20;        // exchanges, since a graph's launch takes long
constexpr const char *kDmaEngine = "dma_engine", *kGraph = "cadre_graph";

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
  small.block = std::min(p.block, small.tokens * p.top_k);
  const bool may_differ = plan.name == kCollective && p.block == 0 && p.cross == Crossing::kAuto;
  if (may_differ)  // from what is timed, which few tokens may not be worth
    small.cross = plan.by_token ? Crossing::kToken : Crossing::kChoice;
  return check_ranks(to_string(small), options.draw, options.device, plan.name).check;
}

bool is_by_window(const ExpertParallelPlan& plan) { return plan.name != kCollective; }

/// Who is timed besides on a GPU: a copy of what crosses, between windows; and what a graph may
/// have, as it may have blocks of an engine.
bool has_dma_engine(const ExpertParallelPlan& plan) {
  return plan.device.kind != DeviceKind::kCpu && is_by_window(plan);
}
bool has_graph(const ExpertParallelPlan& plan) {
  return has_dma_engine(plan) || (plan.device.kind != DeviceKind::kCpu && plan.problem.block > 0);
}

/// Of a row as a call moves it.
int64_t row_bytes(size_t call, const ExpertParallelProblem& p) {
  return call == 0 ? dispatched_bytes(p) : bytes_for(p.dtype, p.hidden);
}

/// Rows where they belong, of all ranks.
double delivered(size_t call, const ExpertParallelProblem& p, const RankRouting& routing) {
  return double(routing.rows(p, false)) * double(row_bytes(call, p));
}

/// Of that what ranks take from others, all of them together: a token once to each rank that has
/// rows of it, or a row for each choice.
int64_t crossing(size_t call, const ExpertParallelPlan& plan, const RankRouting& routing) {
  const ExpertParallelProblem& p = plan.problem;
  const bool by_token = call == 0 ? plan.by_token : p.sum == RowSum::kRank;
  int64_t rows = by_token ? routing.tokens_of_ranks(p, true) : routing.rows(p, true);
  if (by_token && !is_by_window(plan)) rows = routing.tokens_sent(p);
  return rows * row_bytes(call, p);
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

  void run(const RankRouting& routing, const MeasureOptions& options, Mailboxes* mailboxes,
           Times& times) {
    const std::unique_ptr<RankRoute> route =
        open_route(mine_.plan(), rank_, mailboxes, mine_.collective_map());
    const std::unique_ptr<RankRoute> of_graph = route->for_graph();
    mine_.step(*route, [&](std::string_view phase) { rank_.enter(phase); });
    rank_.enter("the check of the route");
    route->check();
    if (accelerator_ && is_by_window(mine_.plan())) mine_.move_into(*route->window());
    for (size_t call = 0; call < kCalls.size(); ++call) {
      rank_.enter(kCalls[call]);
      std::vector<Peer> contestants = {
          {"cadre", std::string(mine_.plan().name), [&, call] { exchange(call, *route); }}};
      add_copy(bytes_of(call, mine_.plan().problem, routing) / ranks(), contestants);
      if (has_dma_engine(mine_.plan()))
        add_dma_engine(*route->window(), crossing(call, mine_.plan(), routing) / ranks(),
                       contestants);
      if (has_graph(mine_.plan()))
        add_graph([&, call] { exchange(call, of_graph ? *of_graph : *route); }, contestants);
      const std::vector<Timing> timings = time(contestants, options);
      for (size_t j = 0; j < timings.size(); ++j)
        times.of[call][j] = per_exchange(timings[j], timings[j].name == kGraph ? kInGraph : 1);
    }
    rank_.meet();  // nobody's window ends while others read it
  }

 private:
  int ranks() const { return mine_.plan().problem.ranks; }

  void exchange(size_t call, RankRoute& route) {
    call == 0 ? mine_.dispatch(route) : mine_.collect(route);
  }

  void add_copy(double bytes, std::vector<Peer>& contestants) {
    const Work work{.bytes = bytes};
    const std::vector<Peer> copies =
        accelerator_ ? device_copy_peer(work, *accelerator_).list : copy_peer(work);
    contestants.insert(contestants.end(), copies.begin(), copies.end());
  }

  /// What crosses, by the DMA engines of all ranks at once.
  void add_dma_engine(const Window& window, int64_t bytes, std::vector<Peer>& contestants) {
    const int next = (window.rank() + 1) % ranks();
    const WindowLayout& at = mine_.plan().window;
    char* here = static_cast<char*>(window.tokens(mine_.plan()).data) + at.rows - at.tokens;
    const char* there = here + (next - window.rank()) * window.bytes();
    contestants.push_back(
        {kDmaEngine, "", [this, here, there, bytes] { accelerator_->copy(here, there, bytes); }});
  }

  /// The same from a graph. While a thread records, others must not take memory.
  void add_graph(const std::function<void()>& exchange, std::vector<Peer>& contestants) {
    for (int turn = 0; turn < ranks(); ++turn) {
      rank_.meet();
      if (turn == rank_.number())
        contestants.push_back({kGraph, "", accelerator_->record([&] {
                                 for (int i = 0; i < kInGraph; ++i) exchange();
                               })});
    }
    rank_.meet();
  }

  /// On the CPU a launch ends when all ranks are through, so that all see the same times.
  std::vector<Timing> time(std::vector<Peer>& contestants, const MeasureOptions& options) {
    if (!accelerator_) {
      for (Peer& contestant : contestants)
        contestant.run = [this, run = contestant.run] {
          run();
          rank_.meet();
        };
      return contest({contestants}, options.contest, nullptr);
    }
    if (options.contest.load_s > 0) load(contestants, options.contest);
    ContestOptions loaded = options.contest;
    loaded.load_s = 0;
    return contest({contestants}, loaded, accelerator_.get());
  }

  /// All ranks launch as often: what seconds say elsewhere rank 0 says in launches here.
  void load(const std::vector<Peer>& contestants, const ContestOptions& options) {
    constexpr int kFirst = 20;
    ContestOptions first = options;
    first.repeat = kFirst, first.load_s = 0;
    const double us = contest({contestants}, first, accelerator_.get())[0].us.median;
    const auto launches = int64_t(options.load_s * 1e6 / std::max(us, 1.0));
    const int64_t agreed = std::stoll(rank_.all_gather()(std::to_string(launches))[0]);
    for (int64_t i = 0; i < agreed; ++i) contestants[0].run();
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
  const std::unique_ptr<Mailboxes> mailboxes = mailboxes_of(plan);
  run_ranks_on(plan.device, p.ranks, [&](Rank& rank) {
    const int q = rank.number();
    const ExpertParallelPlan mine =
        cadre::plan(p, device_of_rank(plan.device, q, p.ranks), plan.name);
    TimedRank(rank, mine, routing, inputs).run(routing, options, mailboxes.get(), times[q]);
    return std::string();
  });
  return times[0];
}

/// What was timed of a call, in the order in which a rank times it.
std::vector<Timing> timings_of(size_t call, const ExpertParallelPlan& plan,
                               const RankRouting& routing, const Times& times) {
  const int64_t bytes = int64_t(bytes_of(call, plan.problem, routing) / 2);
  std::vector<std::pair<std::string, std::string>> contestants = {
      {"cadre", std::string(plan.name)},
      {"copy", text("a copy of ", bytes, " bytes by all ranks")}};
  if (has_dma_engine(plan))
    contestants.emplace_back(kDmaEngine, text(crossing(call, plan, routing) / plan.problem.ranks,
                                              " bytes to each rank from another"));
  if (has_graph(plan))
    contestants.emplace_back(kGraph, text("one of ", kInGraph, " in a CUDA graph"));
  std::vector<Timing> timings;
  for (const auto& [name, what] : contestants) {
    const Times::One& one = times.of[call][timings.size()];
    timings.push_back({name, what, one.us, one.speed});
  }
  return timings;
}

}  // namespace

std::vector<Measurement> measure_ranks(std::string_view words, const MeasureOptions& options) {
  const ExpertParallelPlan chosen = plan_of_ranks(words, options.device, options.only);
  const ExpertParallelProblem& p = chosen.problem;
  Measurement m;
  m.problem = to_string(p);
  m.plan = chosen.name;
  m.is_of_ranks = true;
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
    one.crossed_bytes = double(crossing(call, chosen, routing));
    one.timings = timings_of(call, chosen, routing, times);
  }
  return all;
}

}  // namespace cadre::bench
