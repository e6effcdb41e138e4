// The four exchanges by the caller's engine. Rows leave as a permute among all experts has them, so
// those for a rank are one segment; they come by rank, and one more permute brings them in order.
#include "parallel/checks.h"
#include "parallel/collective_passage.h"
#include "parallel/exchange.h"

namespace cadre {
namespace parallel {
namespace {

/// The checks of an exchange's arguments.
class CollectiveChecks : public ExchangeChecks {
 public:
  CollectiveChecks(ExchangeKind call, const Collective& collective, Stream stream)
      : ExchangeChecks(name(call), collective.plan().problem), plan_(collective.plan()) {
    holds(problem().block > 0 || recorded_graph(collective.plan().device, stream) == 0,
          "the stream is recorded into a graph, must run; the host reads how many rows travel");
  }
  /// [t, H]
  void tokens(std::string_view what, const TensorView& v) const {
    view(what, v, problem().dtype, {token_count(what, v), problem().hidden});
  }
  /// [R, H]
  void rows(std::string_view what, const TensorView& v) const {
    view(what, v, problem().dtype, {problem().rows, problem().hidden});
  }
  void map(const CollectiveMap& map, int64_t tokens) const {
    const auto written = [this](std::string_view what, const auto* list, int64_t count) {
      present(what, list, count, "dispatch writes it");
    };
    const int64_t ranks = problem().ranks, experts = problem().experts;
    written("map.row_of", map.row_of, tokens * problem().top_k);
    written("map.slot_of", map.slot_of, leaving_rows(problem()));
    written("map.leaving", map.leaving, ranks * experts + 1);
    written("map.came_at", map.came_at, problem().rows);
    written("map.row_at", map.row_at, coming_rows(problem()));
    written("map.offsets", map.offsets, experts + 1);
    passing(map.passing);
    if (problem().block > 0) {
      absent("map.counts", map.counts, "the host reads none with block");
      return written("map.verdict", map.verdict, 3);
    }
    written("map.counts", map.counts, plan_.counts);
    absent("map.verdict", map.verdict, "the problem has no block");
  }

 private:
  /// By host alone.
  void passing(const int32_t* list) const {
    if (plan_.by_host)
      present("map.passing", list, plan_.passing, "dispatch writes it");
    else
      absent("map.passing", list, "tokens do not cross by host");
  }

  const ExpertParallelPlan& plan_;
};

}  // namespace
}  // namespace parallel

using parallel::CollectiveChecks;
using parallel::ExchangeKind;
using parallel::Passage;

void dispatch(Collective& collective, const CollectiveDispatchArgs& args, Workspace workspace,
              Stream stream) {
  const ExpertParallelPlan& plan = collective.plan();
  const ExpertParallelProblem& p = plan.problem;
  const CollectiveChecks checks(ExchangeKind::kDispatch, collective, stream);
  checks.tokens("x", args.x);
  checks.present("experts", args.experts, args.x[0] * p.top_k);
  checks.probabilities("prob", args.prob, args.x[0] * p.top_k);
  checks.rows("rows", args.rows);
  checks.probabilities("row_prob", args.row_prob, p.rows);
  checks.map(args.map, args.x[0]);
  checks.workspace(workspace, plan.workspace_bytes);
  if (p.block > 0) return parallel::dispatch_blocks(collective, args, workspace, stream);
  collective.check();
  const Passage passage(collective, args.map, workspace, stream);
  passage.sort_choices(args);
  passage.gather_counts(args);
  passage.leave(args.x);  // while the host waits
  passage.state.link->await();
  passage.check_words();
  passage.count_rows(args.routed);
  passage.count_tokens();
  if (passage.by_host()) passage.count_for_hosts();
  if (!passage.overflowed()) passage.to_experts(true);
  passage.order_rows();  // while rows travel
  if (passage.overflowed()) {
    passage.fill_nan(args.rows);
    return passage.fill_nan(args.row_prob, p.rows);
  }
  if (passage.by_token()) passage.find_tokens(args.row_prob);
  passage.place(args.rows, passage.by_token() ? nullptr : args.row_prob);
}

void collect(Collective& collective, const CollectiveCollectArgs& args, Workspace workspace,
             Stream stream) {
  const CollectiveChecks checks(ExchangeKind::kCollect, collective, stream);
  checks.rows("y", args.y);
  checks.tokens("out", args.out);
  checks.map(args.map, args.out[0]);
  checks.workspace(workspace, collective.plan().workspace_bytes);
  if (collective.plan().problem.block > 0)
    return parallel::collect_blocks(collective, args, workspace, stream);
  const Passage passage(collective, args.map, workspace, stream);
  if (passage.overflowed()) return passage.fill_nan(args.out);
  passage.go_back(args.y, nullptr);
  passage.to_tokens(false);
  passage.sum(args.out, nullptr);
}

void collect_backward(Collective& collective, const CollectiveCollectBackwardArgs& args,
                      Workspace workspace, Stream stream) {
  const CollectiveChecks checks(ExchangeKind::kCollectBackward, collective, stream);
  checks.tokens("dout", args.dout);
  checks.rows("dy", args.dy);
  checks.map(args.map, args.dout[0]);
  checks.workspace(workspace, collective.plan().workspace_bytes);
  if (collective.plan().problem.block > 0)
    return parallel::collect_backward_blocks(collective, args, workspace, stream);
  const Passage passage(collective, args.map, workspace, stream);
  if (passage.overflowed()) return passage.fill_nan(args.dy);
  passage.leave(args.dout);
  passage.to_experts(false);
  passage.place(args.dy, nullptr);
}

void dispatch_backward(Collective& collective, const CollectiveDispatchBackwardArgs& args,
                       Workspace workspace, Stream stream) {
  const ExpertParallelProblem& p = collective.plan().problem;
  const CollectiveChecks checks(ExchangeKind::kDispatchBackward, collective, stream);
  checks.rows("drows", args.drows);
  checks.probabilities("drow_prob", args.drow_prob, p.rows);
  checks.tokens("dx", args.dx);
  checks.probabilities("dprob", args.dprob, args.dx[0] * p.top_k);
  checks.map(args.map, args.dx[0]);
  checks.workspace(workspace, collective.plan().workspace_bytes);
  if (p.block > 0) return parallel::dispatch_backward_blocks(collective, args, workspace, stream);
  const Passage passage(collective, args.map, workspace, stream);
  if (passage.overflowed()) {
    passage.fill_nan(args.dx);
    return passage.fill_nan(args.dprob, args.dx[0] * p.top_k);
  }
  passage.go_back(args.drows, args.drow_prob);
  passage.to_tokens(p.prob);
  passage.sum(args.dx, args.dprob);
}

}  // namespace cadre
