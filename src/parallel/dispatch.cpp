// Tokens to the ranks of their experts, and their gradients back.
#include "parallel/dispatch.h"

#include <utility>

#include "parallel/checks.h"
#include "parallel/exchange.h"

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

/// What a dispatch reads, in its workspace and in the windows of all ranks.
class DispatchRead {
 public:
  DispatchRead(const ExpertParallelPlan& plan, const Window::State& window,
               const DispatchArgs& args, Workspace workspace)
      : plan_(plan),
        p_(plan.problem),
        window_(window),
        args_(args),
        at_(p_, plan.offsets),
        memory_(static_cast<char*>(workspace.data)) {}

  void run(Stream stream) const {
    const int64_t choices = p_.tokens * p_.top_k;
    float* prob = p_.prob ? reinterpret_cast<float*>(memory_ + at_.prob) : nullptr;
    const ListOfRanks lists[] = {{plan_.window.experts, choices, list(at_.experts)},
                                 {plan_.window.prob, choices, prob}};
    window_.device->gather(window_, lists, stream);
    cadre::run(plan_.offsets,
               {.source = list(at_.experts),
                .offsets = list(at_.offsets),
                .map = {.row_of = list(at_.row_of), .slot_of = list(at_.slot_of)}},
               {memory_ + at_.scratch, plan_.offsets.workspace_bytes}, stream);
    window_.device->make_map(window_, map_job(), stream);
    cadre::run(plan_.dispatch,
               {.tokens = of_ranks(window_, plan_.window.tokens, p_.dtype, p_.tokens, p_.hidden),
                .rows = args_.rows,
                .map = {.row_of = args_.map.row_here, .slot_of = args_.map.slot_of},
                .offsets = {args_.map.offsets, p_.experts},
                .prob = prob,
                .row_prob = args_.row_prob},
               {}, stream);
  }

 private:
  int32_t* list(int64_t offset) const { return reinterpret_cast<int32_t*>(memory_ + offset); }

  MapJob map_job() const {
    return {.problem = plan_.tag,
            .ranks = p_.ranks,
            .rank = window_.rank,
            .experts = p_.experts,
            .bound = p_.rows,
            .choices = p_.tokens * p_.top_k,
            .own = args_.x[0] * p_.top_k,
            .overflow_is_error = p_.overflow == Overflow::kError,
            .sorted = list(at_.offsets),
            .slot_sorted = list(at_.slot_of),
            .row_sorted = list(at_.row_of),
            .chosen = list(at_.experts),
            .map = args_.map,
            .routed = args_.routed};
  }

  const ExpertParallelPlan& plan_;
  const ExpertParallelProblem& p_;
  const Window::State& window_;
  const DispatchArgs& args_;
  DispatchMemory at_;
  char* memory_;
};

}  // namespace
}  // namespace parallel

using parallel::ArgsChecks;
using parallel::brought;
using parallel::brought_list;
using parallel::BroughtRows;
using parallel::DispatchRead;
using parallel::ExchangeJob;
using parallel::ExchangeKind;
using parallel::ListOfRanks;
using parallel::of_ranks;
using parallel::offsets_of_sums;
using parallel::outcome;
using parallel::run_exchange;
using parallel::with_tokens;

void dispatch(const ExpertParallelPlan& plan, Window& window, const DispatchArgs& args,
              Workspace workspace, Stream stream) {
  const ExpertParallelProblem& p = plan.problem;
  const ArgsChecks checks(ExchangeKind::kDispatch, plan, window);
  checks.tokens("x", args.x);
  const int64_t slots = args.x[0] * p.top_k;
  checks.present("experts", args.experts, slots);
  checks.probabilities("prob", args.prob, slots);
  checks.rows("rows", args.rows);
  checks.probabilities("row_prob", args.row_prob, p.rows);
  checks.aligned("routed", args.routed, alignof(int32_t));
  checks.map(args.map, args.x[0]);
  checks.workspace(workspace, plan.workspace_bytes);
  Window::State& state = window.state();
  state.check_overflow();
  state.remember(plan);
  char* home = state.of(state.rank);
  const BroughtRows experts{.from = args.experts,
                            .to = home + plan.window.experts,
                            .row_bytes = sizeof(int32_t),
                            .step = sizeof(int32_t),
                            .rows = slots,
                            .filled = p.tokens * p.top_k};  // absent tokens choose nobody
  const ExchangeJob job{.name = {ExchangeKind::kDispatch, plan.tag},
                        .brought = {brought(args.x, home + plan.window.tokens), experts,
                                    brought_list(args.prob, slots, home + plan.window.prob)},
                        .outcomes = {outcome(args.rows), outcome(args.row_prob, p.rows)},
                        .verdict = args.map.verdict};
  const DispatchRead read(plan, state, args, workspace);
  run_exchange(job, state, stream, [&] { read.run(stream); });
}

void dispatch_backward(const ExpertParallelPlan& plan, Window& window,
                       const DispatchBackwardArgs& args, Workspace workspace, Stream stream) {
  const ExpertParallelProblem& p = plan.problem;
  const ArgsChecks checks(ExchangeKind::kDispatchBackward, plan, window);
  checks.rows("drows", args.drows);
  checks.probabilities("drow_prob", args.drow_prob, p.rows);
  checks.tokens("dx", args.dx);
  checks.probabilities("dprob", args.dprob, args.dx[0] * p.top_k);
  checks.map(args.map, args.dx[0]);
  checks.workspace(workspace, plan.workspace_bytes);
  const Window::State& state = window.state();
  auto* drow_prob = p.prob ? static_cast<float*>(workspace.data) : nullptr;
  char* home = state.of(state.rank);
  const int32_t* used = args.map.offsets + p.experts;
  BroughtRows of_prob = brought_list(args.drow_prob, p.rows, home + plan.window.drow_prob);
  of_prob.used = used;
  const ExchangeJob job{.name = {ExchangeKind::kDispatchBackward, plan.tag},
                        .brought = {brought(args.drows, home + plan.window.rows, used), of_prob},
                        .outcomes = {outcome(args.dx), outcome(args.dprob, args.dx[0] * p.top_k)},
                        .verdict = args.map.verdict};
  run_exchange(job, state, stream, [&] {
    const ListOfRanks lists[] = {{plan.window.drow_prob, p.rows, drow_prob}};
    state.device->gather(state, lists, stream);
    const PermuteArgs back{.tokens = args.dx,
                           .rows = of_ranks(state, plan.window.rows, p.dtype, p.rows, p.hidden),
                           .map = {.row_of = args.map.row_of},
                           .offsets = offsets_of_sums(p, args.map),
                           .drow_prob = drow_prob,
                           .dprob = args.dprob};
    run(with_tokens(plan.dispatch_backward, args.dx[0]), back, {}, stream);
  });
}

}  // namespace cadre
