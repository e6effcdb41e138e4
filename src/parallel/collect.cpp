// Rows of the experts to the ranks of their tokens, and their gradients back.
#include "parallel/checks.h"
#include "parallel/exchange.h"

namespace cadre {

using parallel::ArgsChecks;
using parallel::brought;
using parallel::ExchangeJob;
using parallel::ExchangeKind;
using parallel::of_ranks;
using parallel::outcome;
using parallel::read_of_sums;
using parallel::results;
using parallel::run_exchange;
using parallel::with_tokens;

void collect(const ExpertParallelPlan& plan, Window& window, const CollectArgs& args,
             Stream stream) {
  const ExpertParallelProblem& p = plan.problem;
  const ArgsChecks checks(ExchangeKind::kCollect, plan, window);
  checks.results("y", args.y);
  checks.tokens("out", args.out);
  checks.map(args.map, args.out[0]);
  const Window::State& state = window.state();
  const ExchangeJob job{.name = {ExchangeKind::kCollect, plan.tag},
                        .brought = {results(plan, state, args.y, args.map.offsets + p.experts)},
                        .outcomes = {outcome(args.out)},
                        .verdict = args.map.verdict};
  const PermutePlan fewer = with_tokens(plan.collect, args.out[0]);
  run_exchange(plan, state, job, read_of_sums(plan, fewer, state, {args.y, args.out, args.map}),
               stream);
}

void collect_backward(const ExpertParallelPlan& plan, Window& window,
                      const CollectBackwardArgs& args, Stream stream) {
  const ExpertParallelProblem& p = plan.problem;
  const ArgsChecks checks(ExchangeKind::kCollectBackward, plan, window);
  checks.tokens("dout", args.dout);
  checks.rows("dy", args.dy);
  checks.map(args.map, args.dout[0]);
  const Window::State& state = window.state();
  const ExchangeJob job{.name = {ExchangeKind::kCollectBackward, plan.tag},
                        .brought = {brought(args.dout, state.of(state.rank) + plan.window.tokens)},
                        .outcomes = {outcome(args.dy)},
                        .verdict = args.map.verdict};
  const PermuteArgs read{.tokens = of_ranks(state, plan.window.tokens, p.dtype, p.tokens, p.hidden),
                         .rows = args.dy,
                         .map = {.row_of = args.map.row_here, .slot_of = args.map.slot_of},
                         .offsets = {args.map.offsets, p.experts}};
  run_exchange(plan, state, job, {{plan.collect_backward, read}}, stream);
}

}  // namespace cadre
