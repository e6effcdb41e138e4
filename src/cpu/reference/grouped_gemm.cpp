#include "cpu/reference/grouped_gemm.h"

#include "cpu/accumulate.h"
#include "cpu/load_store.h"
#include "cpu/reference/operand.h"
#include "schedule/expert_rows.h"

namespace cadre::cpu::reference {
namespace {

using schedule::ExpertRows;
using schedule::ExpertWalk;

/// Everything of one run, and one expert's share of it.
struct Work {
  const GroupedGemmProblem& p;
  const GroupedGemmArgs& args;
  int expert = 0;
  ExpertRows rows{};

  Matrix lhs() const {
    const QuantizedShape shape = lhs_shape(p);
    return decode(args.lhs, shape, expert, codes_of(shape));
  }
  Matrix rhs() const {
    const QuantizedShape shape = rhs_shape(p);
    const bool weights = shape.kind == RowsKind::kWeights;
    return decode(args.rhs, shape, expert, weights ? CodeRows{0, p.n} : codes_of(shape));
  }
  double alpha() const { return p.alpha ? args.alpha[expert] : 1.0; }

  double bias(int64_t r, int64_t n) const {
    if (!p.bias) return 0;
    const double scale = p.bias_scale ? args.bias_scale[r] : 1.0;
    if (args.discrete_bias == nullptr) return read(args.bias, expert, n) * scale;
    return read(view(args.discrete_bias[expert], p.bias_dtype, {p.n}), n) * scale;
  }
  double addend(int64_t r, int64_t column) const {
    const double beta = p.beta ? args.beta[expert] : 0.0;
    return beta == 0 ? 0 : beta * read(args.c, r, column);
  }

 private:
  CodeRows codes_of(const QuantizedShape& shape) const {
    return code_rows(shape.format, shape.axis, {rows.first, rows.count()}, expert);
  }
};

double fprop_sum(const Matrix& x, const Matrix& w, int64_t r, int64_t n) {
  double sum = 0;
  for (int64_t k = 0; k < x.cols; ++k) sum += x.at(r, k) * w.at(n, k);
  return sum;
}

double dgrad_sum(const Matrix& dy, const Matrix& w, int64_t r, int64_t k) {
  double sum = 0;
  for (int64_t n = 0; n < dy.cols; ++n) sum += dy.at(r, n) * w.at(n, k);
  return sum;
}

double wgrad_sum(const Matrix& dy, const Matrix& x, int64_t n, int64_t k) {
  double sum = 0;
  for (int64_t r = 0; r < dy.rows; ++r) sum += dy.at(r, n) * x.at(r, k);
  return sum;
}

void ragged_rows(const Work& work) {
  const bool fprop = work.p.pass == Pass::kFprop;
  const Matrix lhs = work.lhs(), rhs = work.rhs();
  for (int64_t i = 0; i < work.rows.count(); ++i) {
    const int64_t r = work.rows.first + i;
    for (int64_t j = 0; j < work.args.out[1]; ++j) {
      const double sum = fprop ? fprop_sum(lhs, rhs, i, j) : dgrad_sum(lhs, rhs, i, j);
      write(work.args.out, {r, j}, work.alpha() * sum + work.addend(r, j) + work.bias(r, j));
    }
  }
}

bool accumulates(const Work& work) {
  return cpu::accumulates(work.p.accumulate, work.args.accumulate, work.expert);
}

/// dw of the expert as a view of its own.
TensorView weight_gradient(const Work& work) {
  const TensorView& all = work.args.out;
  TensorView one = view(nullptr, all.dtype, {all[1], all[2]}, {all.stride[1], all.stride[2]});
  one.data = work.args.discrete_out
                 ? work.args.discrete_out[work.expert]
                 : static_cast<char*>(all.data) + bytes_for(all.dtype, work.expert * all.stride[0]);
  return one;
}

void ragged_contraction(const Work& work) {
  const bool accumulate = accumulates(work), empty = work.rows.count() == 0;
  if (accumulate && empty) return;
  const Matrix dy = work.lhs(), x = work.rhs();
  const TensorView dw = weight_gradient(work);
  for (int64_t n = 0; n < work.p.n; ++n) {
    for (int64_t k = 0; k < work.p.k; ++k) {
      const double product = empty ? 0 : work.alpha() * wgrad_sum(dy, x, n, k);
      write(dw, {n, k}, accumulate ? read(dw, n, k) + product : product);
    }
  }
}

void zero_tail(const GroupedGemmProblem& p, const GroupedGemmArgs& args) {
  for (int64_t r = schedule::rows_used(args.offsets.data, p.experts, p.rows); r < p.rows; ++r)
    for (int64_t j = 0; j < args.out[1]; ++j) write(args.out, {r, j}, 0);
}

}  // namespace

void grouped_gemm(const GroupedGemmPlan& plan, const GroupedGemmArgs& args, Workspace, Stream) {
  const GroupedGemmProblem& p = plan.problem;
  Work work{p, args};
  for (ExpertWalk walk(args.offsets.data, p.experts, p.rows); walk.next();) {
    work.expert = walk.expert();
    work.rows = walk.rows();
    p.pass == Pass::kWgrad ? ragged_contraction(work) : ragged_rows(work);
  }
  if (p.tail == Tail::kZero) zero_tail(p, args);
}

}  // namespace cadre::cpu::reference
