#include "cpu/reference/bias_grad.h"

#include "cpu/accumulate.h"
#include "cpu/load_store.h"
#include "schedule/expert_rows.h"

namespace cadre::cpu::reference {
namespace {

using schedule::ExpertRows;
using schedule::ExpertWalk;

TensorView dbias_of(const BiasGradProblem& p, const BiasGradArgs& args, int expert) {
  if (p.discrete) return view(args.discrete_dbias[expert], p.dbias, {p.n});
  return view(row_address(args.dbias, expert), p.dbias, {p.n});
}

TensorView bias_of(const BiasGradProblem& p, const BiasGradArgs& args, int expert) {
  if (p.discrete) return view(args.discrete_bias[expert], p.bias, {p.n});
  return view(row_address(args.bias, expert), p.bias, {p.n});
}

void expert_dbias(const BiasGradProblem& p, const BiasGradArgs& args, const ExpertWalk& walk) {
  const bool add = accumulates(p.accumulate, args.accumulate, walk.expert());
  const ExpertRows rows = walk.rows();
  if (add && rows.count() == 0) return;
  const TensorView dbias = dbias_of(p, args, walk.expert());
  for (int64_t n = 0; n < p.n; ++n) {
    double sum = add ? read(dbias, n) : 0;
    for (int64_t r = rows.first; r < rows.last; ++r)
      sum += read(args.dy, r, n) * (p.bias_scale ? args.bias_scale[r] : 1.0);
    write(dbias, {n}, sum);
  }
}

void expert_dbias_scale(const BiasGradProblem& p, const BiasGradArgs& args,
                        const ExpertWalk& walk) {
  const TensorView bias = bias_of(p, args, walk.expert());
  for (int64_t r = walk.rows().first; r < walk.rows().last; ++r) {
    double sum = 0;
    for (int64_t n = 0; n < p.n; ++n) sum += read(args.dy, r, n) * read(bias, n);
    args.dbias_scale[r] = float(sum);
  }
}

}  // namespace

void bias_grad(const BiasGradPlan& plan, const BiasGradArgs& args, Workspace, Stream) {
  const BiasGradProblem& p = plan.problem;
  for (ExpertWalk walk(args.offsets.data, p.experts, p.rows); walk.next();) {
    expert_dbias(p, args, walk);
    if (p.bias_scale) expert_dbias_scale(p, args, walk);
  }
  const int64_t used = schedule::rows_used(args.offsets.data, p.experts, p.rows);
  for (int64_t r = used; r < p.rows && p.bias_scale && p.tail == Tail::kZero; ++r)
    args.dbias_scale[r] = 0;
}

}  // namespace cadre::cpu::reference
