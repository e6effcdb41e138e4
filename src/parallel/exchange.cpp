#include "parallel/exchange.h"

namespace cadre::parallel {

void run_exchange(const ExpertParallelPlan& plan, const Window::State& window,
                  const ExchangeJob& job, const ExchangeRead& read, Stream stream) {
  RankDevice& device = *window.device;
  try {
    window.check_failure();
    if (plan.name == kFewTokens) return device.run_few(window, job, read, stream);
    if (read.before) {
      device.await_readers(window, job.name, stream);
      cadre::run(read.before->plan, read.before->args, {}, stream);
    }
    device.begin(window, job, stream);
    if (read.map != nullptr) device.make_map(window, *read.map, stream);
    cadre::run(read.plan, read.args, {}, stream);
    if (read.behind) cadre::run(read.behind->plan, read.behind->args, {}, stream);
    device.end(window, job, stream);
  } catch (...) {
    device.spoil(job);
    throw;
  }
}

char* list_of_rank(const Window::State& window, int64_t part, int64_t each) {
  return window.of(window.rank) + part + window.rank * each * int64_t(sizeof(int32_t));
}

BroughtRows brought(const TensorView& from, char* to, const int32_t* used) {
  return {.from = from.data,
          .to = to,
          .row_bytes = bytes_for(from.dtype, from[1]),
          .step = bytes_for(from.dtype, from.stride[0]),
          .rows = from[0],
          .used = used};
}

Outcome outcome(const TensorView& v) {
  return {.data = v.data,
          .row_bytes = bytes_for(v.dtype, v[1]),
          .step = bytes_for(v.dtype, v.stride[0]),
          .rows = v[0]};
}
Outcome outcome(float* data, int64_t count) {
  return {.data = data, .row_bytes = sizeof(float), .step = sizeof(float), .rows = count};
}

TensorView of_ranks(const Window::State& window, int64_t part, DType dtype, int64_t rows,
                    int64_t columns) {
  char* first = window.of(0) + part;
  if (window.ranks == 1) return view(first, dtype, {rows, columns});
  const int64_t step = window.bytes_each * 8 / bits(dtype);
  return view(first, dtype, {window.ranks, rows, columns}, {step, columns, 1});
}

BroughtRows results(const ExpertParallelPlan& plan, const Window::State& window,
                    const TensorView& from, const int32_t* used) {
  if (plan.problem.push || plan.problem.sum == RowSum::kRank) return {};
  return brought(from, window.of(window.rank) + plan.window.rows, used);
}

TensorView summed_rows(const ExpertParallelPlan& plan, const Window::State& window) {
  const ExpertParallelProblem& p = plan.problem;
  if (p.sum == RowSum::kRank)
    return of_ranks(window, plan.window.rows, p.dtype, p.ranks * p.tokens, p.hidden);
  if (!p.push) return of_ranks(window, plan.window.rows, p.dtype, p.rows, p.hidden);
  return view(window.of(window.rank) + plan.window.rows, p.dtype, {p.tokens * p.top_k, p.hidden});
}

Offsets offsets_of_sums(const ExpertParallelProblem& p, const ExchangeMap& map) {
  const bool is_of_rows = p.ranks == 1 && !p.push && p.sum == RowSum::kChoice;
  return is_of_rows ? Offsets{map.offsets, p.experts} : Offsets{};
}

/// Of what this rank has of rows: the sums for the tokens of all, into its window.
static RowsMove sums_here(const ExpertParallelPlan& plan, const Window::State& window,
                          const TensorView& rows, const ExchangeMap& map) {
  const ExpertParallelProblem& p = plan.problem;
  char* sums = window.of(window.rank) + plan.window.rows;
  return {plan.sum_here,
          {.tokens = view(sums, p.dtype, {p.ranks * p.tokens, p.hidden}),
           .rows = rows,
           .map = {.row_of = map.row_here},
           .offsets = {map.offsets, p.experts}}};
}

ExchangeRead read_of_sums(const ExpertParallelPlan& plan, const PermutePlan& of,
                          const Window::State& window, const SummedRows& sums) {
  const ExpertParallelProblem& p = plan.problem;
  const bool by_rank = p.sum == RowSum::kRank;
  ExchangeRead read{{of,
                     {.tokens = sums.to,
                      .rows = summed_rows(plan, window),
                      .map = {.row_of = by_rank ? sums.map.sum_of : sums.map.row_of},
                      .offsets = offsets_of_sums(p, sums.map)}}};
  if (by_rank) read.before.emplace(sums_here(plan, window, sums.rows, sums.map));
  return read;
}

}  // namespace cadre::parallel
