// Rows of the experts to the ranks of their tokens, and their gradients back.
#include "parallel/checks.h"
#include "parallel/exchange.h"
#include "schedule/expert_rows.h"

namespace cadre {

void collect(const ExpertParallelPlan& plan, Window& window, const CollectArgs& args,
             Stream stream) {
  const ExpertParallelProblem& p = plan.problem;
  const parallel::ArgsChecks checks(parallel::ExchangeKind::kCollect, plan, window);
  checks.rows("y", args.y);
  checks.tokens("out", args.out);
  checks.map(args.map, args.out[0]);
  Window::State& state = window.state();
  const auto spoil = [&] { parallel::fill_nan(args.out); };
  const auto write = [&] {
    const int64_t used = schedule::rows_used(args.map.offsets, p.experts, p.rows);
    parallel::publish(args.y, used, state.of(state.rank) + plan.window.rows);
  };
  const auto read = [&] {
    run(parallel::with_tokens(plan.collect, args.out[0]),
        {.tokens = args.out,
         .rows = parallel::of_ranks(state, plan.window.rows, p.dtype, p.rows, p.hidden),
         .map = {.row_of = args.map.row_of},
         .offsets = parallel::offsets_of_sums(p, args.map)},
        {}, stream);
    if (*args.map.verdict != 0) spoil();
  };
  parallel::run_exchange({parallel::ExchangeKind::kCollect, plan.tag}, state,
                         parallel::ExchangeWork{write, read, spoil});
}

void collect_backward(const ExpertParallelPlan& plan, Window& window,
                      const CollectBackwardArgs& args, Stream stream) {
  const ExpertParallelProblem& p = plan.problem;
  const parallel::ArgsChecks checks(parallel::ExchangeKind::kCollectBackward, plan, window);
  checks.tokens("dout", args.dout);
  checks.rows("dy", args.dy);
  checks.map(args.map, args.dout[0]);
  Window::State& state = window.state();
  const auto spoil = [&] { parallel::fill_nan(args.dy); };
  const auto write = [&] {
    parallel::publish(args.dout, args.dout[0], state.of(state.rank) + plan.window.tokens);
  };
  const auto read = [&] {
    run(plan.collect_backward,
        {.tokens = parallel::of_ranks(state, plan.window.tokens, p.dtype, p.tokens, p.hidden),
         .rows = args.dy,
         .map = {.slot_of = args.map.slot_of},
         .offsets = {args.map.offsets, p.experts}},
        {}, stream);
    if (*args.map.verdict != 0) spoil();
  };
  parallel::run_exchange({parallel::ExchangeKind::kCollectBackward, plan.tag}, state,
                         parallel::ExchangeWork{write, read, spoil});
}

}  // namespace cadre
