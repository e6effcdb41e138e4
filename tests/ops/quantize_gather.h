#pragma once
#include "cadre/permute.h"
#include "tests/ops/quantize_case.h"

// Rows that quantising gathers from tokens, and the same rows copied before.
namespace cadre::test {

/// The rows of a case as the tokens of another batch: each row has one by chance, or none.
inline QuantizeCase gathered(QuantizeCase c, const Counts& counts, int top_k,
                             std::mt19937& random) {
  QuantizeProblem& p = c.problem;
  p.gather = true;
  p.tokens = p.rows;
  p.top_k = top_k;
  p.rows = counts.rows;
  p.experts = counts.experts();
  c.offsets = counts.offsets();
  const int64_t slots = p.tokens * top_k;
  const int32_t none[] = {-1, int32_t(slots), INT32_MAX, INT32_MIN};
  for (int64_t r = 0; r < p.rows; ++r)
    c.slots.push_back(random() % 6 == 0 ? none[random() % 4] : int32_t(random() % slots));
  return c;
}

/// The same with rows that permute made. The tail keeps its poison.
inline QuantizeCase permuted(const QuantizeCase& c) {
  QuantizeCase rows = c;
  QuantizeProblem& p = rows.problem;
  rows.source = Tensor(p.source, {p.rows, p.cols}, {.row_gap = 7});
  p.gather = false;
  p.tokens = 0;
  p.top_k = 1;
  if (p.cols == 0) return rows;
  const PermuteProblem copy{.tokens = c.problem.tokens,
                            .top_k = c.problem.top_k,
                            .rows = p.rows,
                            .hidden = p.cols,
                            .experts = p.experts,
                            .dtype = p.source};
  cadre::run(plan(copy, this_cpu(), "cpu_reference"),
             {.tokens = c.source.view(),
              .rows = rows.source.view(),
              .map = {.slot_of = const_cast<int32_t*>(c.slots.data())},
              .offsets = {c.offsets.data(), p.experts}},
             {}, {});
  return rows;
}

}  // namespace cadre::test
