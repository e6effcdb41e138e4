#include "cpu/bias_grad.h"

#include <algorithm>

#include "cpu/accumulate.h"
#include "cpu/lanes.h"
#include "cpu/load_store.h"
#include "cpu/threads.h"
#include "schedule/expert_rows.h"

namespace cadre::cpu {
namespace {

using schedule::ExpertRows;
using schedule::ExpertWalk;

constexpr int kBlock = 128;  // columns at a time
using Block = Lanes<kBlock>;

/// What is the same for all experts.
struct Work {
  const BiasGradProblem& p;
  const BiasGradArgs& args;
  LoadRun load_dy = load_run(p.dy), load_bias = load_run(p.bias), load_dbias = load_run(p.dbias);
  StoreRun store_dbias = store_run(p.dbias);

  Run columns(int64_t first) const {
    return {first, 1, int(std::min<int64_t>(kBlock, p.n - first))};
  }
  bool adds(int expert) const { return accumulates(p.accumulate, args.accumulate, expert); }
  void* dbias(int expert) const {
    return p.discrete ? args.discrete_dbias[expert] : row_address(args.dbias, expert);
  }
  const void* bias(int expert) const {
    return p.discrete ? args.discrete_bias[expert] : row_address(args.bias, expert);
  }
};

/// dbias of one expert in one block of columns: the rows in their order, then what was there.
void block_dbias(const Work& work, int expert, int64_t first) {
  const int32_t* offsets = work.args.offsets.data;
  const int64_t used = schedule::rows_used(offsets, work.p.experts, work.p.rows);
  const ExpertRows rows = schedule::rows_of(offsets, expert, used);
  const bool add = work.adds(expert);
  if (add && rows.count() == 0) return;
  const Run columns = work.columns(first);
  Block sum{}, x;
  for (int64_t r = rows.first; r < rows.last; ++r) {
    const float scale = work.p.bias_scale ? work.args.bias_scale[r] : 1.0f;
    work.load_dy(row_address(work.args.dy, r), columns, x.at);
    add_scaled(sum.at, x.at, scale, columns.count);
  }
  if (add) {
    work.load_dbias(work.dbias(expert), columns, x.at);
    add_scaled(sum.at, x.at, 1.0f, columns.count);
  }
  work.store_dbias(work.dbias(expert), columns, sum.at);
}

/// <dy[r], bias[e]> in 128 sums, added up in a fixed order.
float row_dbias_scale(const Work& work, int expert, int64_t r) {
  Block sum{}, x, bias;
  for (int64_t first = 0; first < work.p.n; first += kBlock) {
    const Run columns = work.columns(first);
    work.load_dy(row_address(work.args.dy, r), columns, x.at);
    work.load_bias(work.bias(expert), columns, bias.at);
    add_products(sum.at, x.at, bias.at, columns.count);
  }
  return total(sum);
}

void all_dbias_scale(const Work& work) {
  const BiasGradProblem& p = work.p;
#pragma omp parallel if (worth_threads(p.rows * p.n))
  for (ExpertWalk walk(work.args.offsets.data, p.experts, p.rows); walk.next();) {
    const ExpertRows rows = walk.rows();
#pragma omp for schedule(static) nowait
    for (int64_t r = rows.first; r < rows.last; ++r)
      work.args.dbias_scale[r] = row_dbias_scale(work, walk.expert(), r);
  }
  if (p.tail == Tail::kKeep) return;
  const int64_t used = schedule::rows_used(work.args.offsets.data, p.experts, p.rows);
  std::fill(work.args.dbias_scale + used, work.args.dbias_scale + p.rows, 0.0f);
}

}  // namespace

void bias_grad(const BiasGradPlan& plan, const BiasGradArgs& args, Workspace, Stream) {
  const BiasGradProblem& p = plan.problem;
  const Work work{.p = p, .args = args};
  const int64_t blocks = (p.n + kBlock - 1) / kBlock;
#pragma omp parallel for schedule(dynamic) if (worth_threads(p.rows * p.n))
  for (int64_t task = 0; task < p.experts * blocks; ++task)
    block_dbias(work, int(task / blocks), task % blocks * kBlock);
  if (p.bias_scale) all_dbias_scale(work);
}

}  // namespace cadre::cpu
