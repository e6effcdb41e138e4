// Tokens to the ranks of their experts, and their gradients back.
#include "parallel/dispatch.h"

#include <algorithm>
#include <utility>

#include "cadre/error.h"
#include "parallel/checks.h"
#include "parallel/exchange.h"
#include "schedule/rank_rows.h"

namespace cadre {
namespace parallel {

DispatchMemory::DispatchMemory(const ExpertParallelProblem& p, const OffsetsPlan& offsets_plan) {
  const int64_t slots = p.ranks * p.tokens * p.top_k;
  const auto take = [this](int64_t count) {
    return std::exchange(bytes, bytes + aligned(count * int64_t(sizeof(int32_t))));
  };
  experts = take(slots);
  prob = take(slots);
  offsets = take(int64_t(p.ranks) * p.experts + 1);
  row_of = take(slots);
  slot_of = take(slots);
  scratch = std::exchange(bytes, bytes + aligned(offsets_plan.workspace_bytes));
}

namespace {

/// One dispatch of a rank, while its workspace holds the choices of all.
class Dispatch {
 public:
  Dispatch(const ExpertParallelPlan& plan, Window::State& window, const DispatchArgs& args,
           Workspace workspace)
      : plan_(plan),
        p_(plan.problem),
        window_(window),
        args_(args),
        at_(p_, plan.offsets),
        memory_(static_cast<char*>(workspace.data)) {}

  /// Absent tokens choose nobody.
  void write() const {
    char* home = window_.of(window_.rank);
    const int64_t slots = args_.x[0] * p_.top_k;
    auto* experts = reinterpret_cast<int32_t*>(home + plan_.window.experts);
    publish(args_.x, args_.x[0], home + plan_.window.tokens);
    publish(args_.prob, slots, home + plan_.window.prob);
    publish(args_.experts, slots, home + plan_.window.experts);
    std::fill(experts + slots, experts + p_.tokens * p_.top_k, -1);
  }

  void read(Stream stream) const {
    sort_choices();
    write_map();
    float* prob = nullptr;
    if (p_.prob) {
      prob = reinterpret_cast<float*>(memory_ + at_.prob);
      gather(window_, plan_.window.prob, p_.tokens * p_.top_k, prob);
    }
    run(plan_.dispatch,
        {.tokens = of_ranks(window_, plan_.window.tokens, p_.dtype, p_.tokens, p_.hidden),
         .rows = args_.rows,
         .map = {.slot_of = args_.map.slot_of},
         .offsets = {args_.map.offsets, p_.experts},
         .prob = prob,
         .row_prob = args_.row_prob},
        {}, stream);
    if (*args_.map.verdict != 0) spoil();
  }

  void spoil() const {
    fill_nan(args_.rows);
    fill_nan(args_.row_prob, p_.rows);
  }

 private:
  int32_t* list(int64_t offset) const { return reinterpret_cast<int32_t*>(memory_ + offset); }

  /// Sorts the choices of all ranks by expert.
  void sort_choices() const {
    gather(window_, plan_.window.experts, p_.tokens * p_.top_k, list(at_.experts));
    run(plan_.offsets,
        {.source = list(at_.experts),
         .offsets = list(at_.offsets),
         .map = {.row_of = list(at_.row_of), .slot_of = list(at_.slot_of)}},
        {memory_ + at_.scratch, plan_.offsets.workspace_bytes}, {});
  }

  /// Of these rows those of this rank, and where its tokens went.
  void write_map() const {
    const schedule::RankRows rows{list(at_.offsets), p_.experts, p_.rows};
    const int me = window_.rank;
    for (int e = 0; e <= p_.experts; ++e) args_.map.offsets[e] = rows.offset(me, e);
    std::copy_n(list(at_.slot_of) + rows.first(me), args_.map.offsets[p_.experts],
                args_.map.slot_of);
    const int64_t first = me * p_.tokens * p_.top_k;
    const int32_t *row_of = list(at_.row_of) + first, *experts = list(at_.experts) + first;
    for (int64_t i = 0; i < args_.x[0] * p_.top_k; ++i)
      args_.map.row_of[i] = row_of[i] < 0 ? -1 : rows.row_at_rank(row_of[i], experts[i]);
    for (int q = 0; q < p_.ranks && args_.routed != nullptr; ++q)
      args_.routed[q] = int32_t(rows.routed(q));
    *args_.map.verdict = judge(rows);
  }

  /// 1 if rows overflow and that is an error, which is noted for whoever asks next.
  int32_t judge(const schedule::RankRows& rows) const {
    int worst = 0;
    for (int q = 1; q < p_.ranks; ++q)
      if (rows.routed(q) > rows.routed(worst)) worst = q;
    const int64_t routed = rows.routed(worst);
    if (routed <= p_.rows || p_.overflow == Overflow::kDrop) return 0;
    window_.overflow =
        text("expert_parallel: rows of rank ", worst, " are ", routed, ", must be at most R, ",
             p_.rows, "; that step is NaN on every rank; R = ", routed, ", or ",
             double(routed) / double(p_.tokens * p_.top_k),
             " times T * top_k, would have held them [", to_string(p_), "]");
    return 1;
  }

  const ExpertParallelPlan& plan_;
  const ExpertParallelProblem& p_;
  Window::State& window_;
  const DispatchArgs& args_;
  DispatchMemory at_;
  char* memory_;
};

}  // namespace
}  // namespace parallel

void dispatch(const ExpertParallelPlan& plan, Window& window, const DispatchArgs& args,
              Workspace workspace, Stream stream) {
  const ExpertParallelProblem& p = plan.problem;
  const parallel::ArgsChecks checks(parallel::ExchangeKind::kDispatch, plan, window);
  checks.tokens("x", args.x);
  const int64_t slots = args.x[0] * p.top_k;
  checks.present("experts", args.experts, slots);
  checks.probabilities("prob", args.prob, slots);
  checks.rows("rows", args.rows);
  checks.probabilities("row_prob", args.row_prob, p.rows);
  checks.aligned("routed", args.routed, alignof(int32_t));
  checks.map(args.map, args.x[0]);
  checks.workspace(workspace, plan.workspace_bytes);
  window.state().check_overflow();
  const parallel::Dispatch work(plan, window.state(), args, workspace);
  parallel::run_exchange({parallel::ExchangeKind::kDispatch, plan.tag}, window.state(),
                         parallel::ExchangeWork{[&] { work.write(); }, [&] { work.read(stream); },
                                                [&] { work.spoil(); }});
}

void dispatch_backward(const ExpertParallelPlan& plan, Window& window,
                       const DispatchBackwardArgs& args, Workspace workspace, Stream stream) {
  const ExpertParallelProblem& p = plan.problem;
  const parallel::ArgsChecks checks(parallel::ExchangeKind::kDispatchBackward, plan, window);
  checks.rows("drows", args.drows);
  checks.probabilities("drow_prob", args.drow_prob, p.rows);
  checks.tokens("dx", args.dx);
  checks.probabilities("dprob", args.dprob, args.dx[0] * p.top_k);
  checks.map(args.map, args.dx[0]);
  checks.workspace(workspace, plan.workspace_bytes);
  Window::State& state = window.state();
  auto* drow_prob = p.prob ? static_cast<float*>(workspace.data) : nullptr;
  const auto spoil = [&] {
    parallel::fill_nan(args.dx);
    parallel::fill_nan(args.dprob, args.dx[0] * p.top_k);
  };
  const auto write = [&] {
    const int64_t used = schedule::rows_used(args.map.offsets, p.experts, p.rows);
    parallel::publish(args.drows, used, state.of(state.rank) + plan.window.rows);
    parallel::publish(args.drow_prob, used, state.of(state.rank) + plan.window.drow_prob);
  };
  const auto read = [&] {
    if (p.prob) parallel::gather(state, plan.window.drow_prob, p.rows, drow_prob);
    PermuteArgs back{.tokens = args.dx,
                     .rows = parallel::of_ranks(state, plan.window.rows, p.dtype, p.rows, p.hidden),
                     .map = {.row_of = args.map.row_of},
                     .offsets = parallel::offsets_of_sums(p, args.map),
                     .drow_prob = drow_prob,
                     .dprob = args.dprob};
    run(parallel::with_tokens(plan.dispatch_backward, args.dx[0]), back, {}, stream);
    if (*args.map.verdict != 0) spoil();
  };
  parallel::run_exchange({parallel::ExchangeKind::kDispatchBackward, plan.tag}, state,
                         parallel::ExchangeWork{write, read, spoil});
}

}  // namespace cadre
