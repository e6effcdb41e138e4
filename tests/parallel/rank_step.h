#pragma once
#include <cstring>
#include <random>
#include <vector>

#include "tests/parallel/group.h"
#include "tests/parallel/rank_case.h"

// All exchanges of a rank, with what its experts make of the rows; and the same by one rank.
namespace cadre::test {

/// What an expert makes of a row: something that differs by expert, row and column.
inline void make(const Tensor& from, Tensor& to, int64_t row, int expert, float factor) {
  for (int64_t h = 0; h < from.columns(); ++h)
    to.set({row, h}, from.at(row, h) * factor + expert + double(h) / 64);
}

/// Rows into the windows of their tokens' ranks, as a product with scatter writes them.
inline void push(const ExpertParallelPlan& plan, Window& window, const RankCase& r,
                 const Tensor& rows) {
  const ExpertParallelProblem& p = plan.problem;
  window.await_readers();
  const TensorView places = window.places(plan), from = rows.view();
  const int64_t each = p.tokens * p.top_k;
  for (int64_t row = 0; row < r.used(); ++row) {
    const int64_t place = r.place_of[size_t(row)], rank = place / each;
    const int64_t at = place % each * p.hidden + (p.ranks > 1 ? rank * places.stride[0] : 0);
    std::memcpy(static_cast<char*>(places.data) + bytes_for(p.dtype, at),
                static_cast<const char*>(from.data) + bytes_for(p.dtype, row * from.stride[0]),
                size_t(bytes_for(p.dtype, p.hidden)));
  }
}

/// Codes of x if the problem says so. One rank that is to know what these must become dispatches
/// numbers, and makes codes of the rows.
inline void dispatch_numbers_or_codes(const ExpertParallelPlan& plan, Window& window, RankCase& r,
                                      const Workspace& workspace) {
  const ExpertParallelProblem& p = plan.problem;
  if (p.x) r.quantize_x();
  dispatch(plan, window, p.x ? r.code_args(p.prob) : r.dispatch_args(p.prob), workspace, {});
  if (!r.p.x) return;
  if (!p.x) r.quantize_rows();
  r.decode_rows();
}

/// What a rank's experts make of its rows, and of their gradients. `first` is the first of them
/// among all.
inline void make_y(RankCase& r, int first) {
  for (int e = 0; e < r.p.experts; ++e)
    for (int64_t row = r.offsets[size_t(e)]; row < r.offsets[size_t(e) + 1]; ++row)
      make(r.rows, r.y, row, first + e, r.p.prob ? float(r.row_prob.at(row)) : 1.0f);
}
inline void make_drows(RankCase& r, int first) {
  for (int e = 0; e < r.p.experts; ++e)
    for (int64_t row = r.offsets[size_t(e)]; row < r.offsets[size_t(e) + 1]; ++row) {
      make(r.dy, r.drows, row, first + e, 0.5f);
      r.drow_prob.set({row}, r.dy.at(row, 0) + r.rows.at(row, 0));
    }
}

/// One rank, all four exchanges.
inline void step(const ExpertParallelPlan& plan, Window& window, RankCase& r, int first) {
  const ExpertParallelProblem& p = plan.problem;
  const OwnedWorkspace workspace(plan.workspace_bytes);
  dispatch_numbers_or_codes(plan, window, r, workspace.get());
  make_y(r, first);
  if (p.push) push(plan, window, r, r.y);
  collect(plan, window,
          {.y = p.push ? TensorView() : r.y.view(), .out = r.out.view(), .map = r.map()}, {});
  collect_backward(plan, window, {.dout = r.dout.view(), .dy = r.dy.view(), .map = r.map()}, {});
  make_drows(r, first);
  if (p.push) push(plan, window, r, r.drows);
  DispatchBackwardArgs args = r.dispatch_backward_args(p.prob);
  if (p.push) args.drows = {};
  dispatch_backward(plan, window, args, workspace.get(), {});
}

/// The same by one rank, whose tokens are those of all ranks and whose experts are all.
inline RankCase on_one(const ExpertParallelProblem& p, const std::vector<RankCase>& ranks) {
  ExpertParallelProblem one = p;
  one.ranks = 1;
  one.experts = p.ranks * p.experts;
  one.tokens = p.ranks * p.tokens;
  one.rows = one.tokens * p.top_k;
  one.push = false;
  one.block = 0;
  one.sum = RowSum::kChoice;
  one.cross = Crossing::kAuto;
  one.host_ranks = 0;
  RankCase all(one, one.tokens);
  std::fill(all.experts.begin(), all.experts.end(), -1);
  for (int q = 0; q < p.ranks; ++q) {
    const RankCase& r = ranks[size_t(q)];
    const int64_t first = q * p.tokens;
    std::copy(r.experts.begin(), r.experts.end(), all.experts.begin() + first * p.top_k);
    for (int64_t t = 0; t < r.tokens(); ++t) {
      for (int64_t h = 0; h < p.hidden; ++h) {
        all.x.set({first + t, h}, r.x.at(t, h));
        all.dout.set({first + t, h}, r.dout.at(t, h));
      }
      for (int64_t j = 0; j < p.top_k; ++j) all.prob.set({first + t, j}, r.prob.at(t, j));
    }
  }
  one.x = {};
  one.scales_major = Major::kRow;
  const ExpertParallelPlan made = plan(one, rank_device());
  std::vector<Window> windows = windows_of(made);
  step(made, windows[0], all, 0);
  return all;
}

/// RankCases with random tokens, some absent, and choices of which some are of nobody.
inline std::vector<RankCase> random_ranks(const ExpertParallelProblem& p, std::mt19937& random) {
  std::vector<RankCase> ranks;
  const int experts = p.ranks * p.experts, style = int(random() % 4);
  for (int q = 0; q < p.ranks; ++q) {
    RankCase& r =
        ranks.emplace_back(p, random() % 4 == 0 ? 0 : int64_t(random() % uint64_t(p.tokens + 1)));
    for (Tensor* t : {&r.x, &r.dout}) t->fill(random, -2, 2);
    r.prob.fill(random, 0, 1);
    for (int32_t& e : r.experts) {
      e = int32_t(random() % uint64_t(experts));
      if (style == 1) e = experts - 1;    // all to one
      if (style == 2) e = e % p.experts;  // all to the first rank
      if (random() % 8 == 0) e = random() % 2 ? -1 - int32_t(random() % 5) : experts + e;
    }
  }
  return ranks;
}

/// Choices beyond R of their rank are of nobody, in the order of the rows.
inline int64_t drop(const ExpertParallelProblem& p, std::vector<RankCase>& ranks) {
  const RankCase all = on_one(p, ranks);
  int64_t dropped = 0;
  for (int q = 0; q < p.ranks; ++q)
    for (size_t i = 0; i < ranks[size_t(q)].experts.size(); ++i) {
      int32_t& e = ranks[size_t(q)].experts[i];
      const int32_t row = all.row_of[size_t(q * p.tokens * p.top_k) + i];
      if (row < 0) continue;
      const int32_t first = all.offsets[size_t(e / p.experts * p.experts)];
      if (row - first >= p.rows) e = -1, ++dropped;
    }
  return dropped;
}

}  // namespace cadre::test
