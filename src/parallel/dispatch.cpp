// Tokens to the ranks of their experts, and their gradients back.
#include "parallel/dispatch.h"

#include <algorithm>
#include <utility>

#include "parallel/checks.h"
#include "parallel/exchange.h"
#include "parallel/rank_device.h"

namespace cadre {
namespace parallel {

DispatchMemory::DispatchMemory(const ExpertParallelProblem& p, const OffsetsPlan& offsets_plan) {
  const int64_t slots = p.ranks * p.tokens * p.top_k;
  const auto take = [this](int64_t count) {
    return std::exchange(bytes, bytes + aligned(count * int64_t(sizeof(int32_t))));
  };
  offsets = take(int64_t(p.ranks) * p.experts + 1);
  row_of = take(slots);
  slot_of = take(slots);
  scratch_bytes = offsets_plan.workspace_bytes;
  if (p.push)
    scratch_bytes =
        std::max(scratch_bytes, int64_t(sizeof(int32_t)) * kMostSortBlocks * p.ranks * p.experts);
  scratch = std::exchange(bytes, bytes + aligned(scratch_bytes));
}

namespace {

MapJob map_job(const ExpertParallelPlan& plan, const Window::State& window,
               const DispatchArgs& args, Workspace workspace) {
  const ExpertParallelProblem& p = plan.problem;
  const DispatchMemory at(p, plan.offsets);
  auto* memory = static_cast<char*>(workspace.data);
  const auto list = [&](int64_t offset) { return reinterpret_cast<int32_t*>(memory + offset); };
  return {.problem = plan.tag,
          .ranks = p.ranks,
          .rank = window.rank,
          .experts = p.experts,
          .bound = p.rows,
          .choices = p.tokens * p.top_k,
          .own = args.x[0] * p.top_k,
          .top_k = p.top_k,
          .overflow_is_error = p.overflow == Overflow::kError,
          .chosen = list_at<int32_t>(window, plan.window.experts),
          .sort = &plan.offsets,
          .sorted = list(at.offsets),
          .slot_sorted = list(at.slot_of),
          .row_sorted = list(at.row_of),
          .scratch = {memory + at.scratch, at.scratch_bytes},
          .map = args.map,
          .routed = args.routed};
}

/// What travels beside codes.
void add_scales(const ExpertParallelPlan& plan, const Window::State& window,
                const DispatchArgs& args, ExchangeJob& job, PermuteArgs& read) {
  const ExpertParallelProblem& p = plan.problem;
  const TensorView &from = args.x_scales, &to = args.row_scales;
  const int64_t part = plan.window.scales;
  job.brought[3] = brought(from, window.of(window.rank) + part);
  job.outcomes[2] = outcome(p.scales_major == Major::kRow ? to : transposed(to));
  read.token_scales = of_ranks(window, part, from.dtype, p.tokens, from[1]);
  read.row_scales = to;
}

/// The sums of tokens at ranks before any row is known.
BroughtRows no_sums(const ExchangeMap& map, int64_t sums) {
  constexpr auto kBytes = int64_t(sizeof(int32_t));
  return {.to = reinterpret_cast<char*>(map.sum_of),
          .row_bytes = kBytes,
          .step = kBytes,
          .filled = sums};
}

/// With sum=rank: gradients of the probabilities of own choices, from all ranks' lists by row.
RowsMove gradients_of_choices(const PermutePlan& of, const ExpertParallelPlan& plan,
                              const Window::State& window, const DispatchBackwardArgs& args) {
  const ExpertParallelProblem& p = plan.problem;
  auto* words = list_at<float>(window, plan.window.drow_prob);
  return {of,
          {.tokens = view(args.dprob, DType::kF32, {args.dx[0] * p.top_k, 1}),
           .rows = view(words, DType::kF32, {p.ranks * p.rows, 1}),
           .map = {.row_of = args.map.row_of}}};
}

/// Gradients of the probabilities of rows: to all ranks, or, as rows are pushed, to their places.
BroughtRows brought_gradients(const ExpertParallelPlan& plan, const Window::State& window,
                              const DispatchBackwardArgs& args) {
  const ExpertParallelProblem& p = plan.problem;
  const int64_t part = plan.window.drow_prob;
  if (!p.push) return brought_list(args.drow_prob, p.rows, list_of_rank(window, part, p.rows));
  BroughtRows words = brought_list(args.drow_prob, p.rows, window.of(window.rank) + part);
  words.to_all = false;
  words.place_of = args.map.place_of;
  words.places = p.tokens * p.top_k;
  return words;
}

}  // namespace
}  // namespace parallel

using parallel::add_scales;
using parallel::ArgsChecks;
using parallel::brought;
using parallel::brought_gradients;
using parallel::brought_list;
using parallel::BroughtRows;
using parallel::ExchangeJob;
using parallel::ExchangeKind;
using parallel::ExchangeRead;
using parallel::gradients_of_choices;
using parallel::list_at;
using parallel::list_of_rank;
using parallel::no_sums;
using parallel::of_ranks;
using parallel::outcome;
using parallel::read_of_sums;
using parallel::results;
using parallel::run_exchange;
using parallel::with_tokens;

void dispatch(const ExpertParallelPlan& plan, Window& window, const DispatchArgs& args,
              Workspace workspace, Stream stream) {
  const ExpertParallelProblem& p = plan.problem;
  const ArgsChecks checks(ExchangeKind::kDispatch, plan, window);
  checks.dispatched(args);
  const int64_t slots = args.x[0] * p.top_k;
  checks.present("experts", args.experts, slots);
  checks.probabilities("prob", args.prob, slots);
  checks.probabilities("row_prob", args.row_prob, p.rows);
  checks.aligned("routed", args.routed, alignof(int32_t));
  checks.map(args.map, args.x[0]);
  checks.workspace(workspace, plan.workspace_bytes);
  window.check();
  Window::State& state = window.state();
  state.remember(plan);
  const int64_t most = p.tokens * p.top_k;
  BroughtRows experts =
      brought_list(args.experts, slots, list_of_rank(state, plan.window.experts, most));
  experts.filled = most;  // absent tokens choose nobody
  BroughtRows prob;
  if (p.prob) prob = brought_list(args.prob, slots, list_of_rank(state, plan.window.prob, most));
  char* home = state.of(state.rank);
  ExchangeJob job{.name = {ExchangeKind::kDispatch, plan.tag},
                  .brought = {brought(args.x, home + plan.window.tokens), experts, prob},
                  .outcomes = {outcome(args.rows), outcome(args.row_prob, p.rows)},
                  .verdict = args.map.verdict};
  const parallel::MapJob map = parallel::map_job(plan, state, args, workspace);
  PermuteArgs read{.tokens = of_ranks(state, plan.window.tokens, args.x.dtype, p.tokens, p.hidden),
                   .rows = args.rows,
                   .map = {.row_of = args.map.row_here, .slot_of = args.map.slot_of},
                   .offsets = {args.map.offsets, p.experts},
                   .prob = p.prob ? list_at<float>(state, plan.window.prob) : nullptr,
                   .row_prob = args.row_prob};
  if (p.x) add_scales(plan, state, args, job, read);
  if (p.sum == RowSum::kRank) job.brought[4] = no_sums(args.map, args.x[0] * p.ranks);
  run_exchange(plan, state, job, {{plan.dispatch, read}, &map}, stream);
}

void dispatch_backward(const ExpertParallelPlan& plan, Window& window,
                       const DispatchBackwardArgs& args, Workspace workspace, Stream stream) {
  const ExpertParallelProblem& p = plan.problem;
  const ArgsChecks checks(ExchangeKind::kDispatchBackward, plan, window);
  checks.results("drows", args.drows);
  checks.probabilities("drow_prob", args.drow_prob, p.rows);
  checks.tokens("dx", args.dx);
  checks.probabilities("dprob", args.dprob, args.dx[0] * p.top_k);
  checks.map(args.map, args.dx[0]);
  checks.workspace(workspace, plan.workspace_bytes);
  const Window::State& state = window.state();
  const int32_t* used = args.map.offsets + p.experts;
  BroughtRows of_prob;
  if (p.prob) of_prob = brought_gradients(plan, state, args);
  of_prob.used = used;
  const uint32_t unwanted = (args.wants_dx ? 0 : 1) | (args.wants_dprob ? 0 : 2);
  const ExchangeJob job{.name = {ExchangeKind::kDispatchBackward, plan.tag ^ unwanted},
                        .brought = {results(plan, state, args.drows, used), of_prob},
                        .outcomes = {outcome(args.dx), outcome(args.dprob, args.dx[0] * p.top_k)},
                        .verdict = args.map.verdict};
  const PermutePlan fewer = with_tokens(plan.dispatch_backward, args.dx[0]);
  const PermutePlan choices = with_tokens(plan.dprob, args.dx[0] * p.top_k);
  ExchangeRead read = read_of_sums(plan, fewer, state, {args.drows, args.dx, args.map});
  if (p.prob && p.sum == RowSum::kRank) {
    read.behind.emplace(gradients_of_choices(choices, plan, state, args));
  } else if (p.prob) {
    read.args.drow_prob = list_at<float>(state, plan.window.drow_prob);
    read.args.dprob = args.dprob;
  }
  run_exchange(plan, state, job, read, stream);
}

}  // namespace cadre
