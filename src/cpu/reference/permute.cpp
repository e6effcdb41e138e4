#include "cpu/reference/permute.h"

#include "cpu/load_store.h"
#include "schedule/expert_rows.h"

namespace cadre::cpu::reference {
namespace {

/// One element of what lies in the memories of the ranks.
double read_of_ranks(const TensorView& v, int64_t row, int64_t column) {
  return v.rank < 3 ? read(v, row, column) : read(v, row / v.shape[1], row % v.shape[1], column);
}

/// A row as it is stored, element by element: that of a token, or zeros where there is none.
void move_row(const TensorView& from, int64_t token, const TensorView& to, int64_t row) {
  const int64_t bytes = bits(to.dtype) / 8;
  for (int64_t c = 0; c < to[1]; ++c) {
    char* at = static_cast<char*>(to.data) + (row * to.stride[0] + c * to.stride[1]) * bytes;
    for (int64_t b = 0; b < bytes; ++b)
      at[b] =
          token < 0 ? 0 : static_cast<const char*>(rank_row_address(from, token))[c * bytes + b];
  }
}

/// rows[r] = tokens[t] for every row of codes, and its scales.
void codes_from_tokens(const PermuteProblem& p, const PermuteArgs& args, int64_t used) {
  for (int64_t r = 0; r < (p.tail == Tail::kZero ? p.rows : used); ++r) {
    const int64_t slot = r < used ? args.map.slot_of[r] : -1;
    const bool known = slot >= 0 && slot < p.ranks * p.tokens * p.top_k;
    const int64_t token = known ? slot / p.top_k : -1;
    move_row(args.tokens, token, args.rows, r);
    move_row(args.token_scales, token, args.row_scales, r);
    if (args.row_prob != nullptr) args.row_prob[r] = known ? args.prob[slot] : 0.0f;
  }
}

/// rows[r] = p tokens[t] for every row; permute leaves p to row_prob.
void rows_from_tokens(const PermuteProblem& p, const PermuteArgs& args, int64_t used) {
  const bool weighted = p.prob && p.pass == PermutePass::kCombineBackward;
  for (int64_t r = 0; r < used; ++r) {
    const int64_t slot = args.map.slot_of[r];
    const bool known = slot >= 0 && slot < p.ranks * p.tokens * p.top_k;
    const double factor = weighted && known ? args.prob[slot] : 1.0;
    for (int64_t h = 0; h < p.hidden; ++h)
      write(args.rows, {r, h},
            known ? factor * read_of_ranks(args.tokens, slot / p.top_k, h) : 0.0);
    if (args.row_prob != nullptr) args.row_prob[r] = known ? args.prob[slot] : 0.0f;
  }
  for (int64_t r = used; r < p.rows && p.tail == Tail::kZero; ++r) {
    for (int64_t h = 0; h < p.hidden; ++h) write(args.rows, {r, h}, 0);
    if (args.row_prob != nullptr) args.row_prob[r] = 0;
  }
}

/// tokens[t] = sum_j p rows[row_of[t, j]] + addend[t]; permute backward has no p.
void tokens_from_rows(const PermuteProblem& p, const PermuteArgs& args, int64_t used) {
  const bool weighted = p.prob && p.pass == PermutePass::kCombine;
  for (int64_t t = 0; t < p.tokens; ++t)
    for (int64_t h = 0; h < p.hidden; ++h) {
      double sum = 0;
      for (int64_t slot = t * p.top_k; slot < (t + 1) * p.top_k; ++slot) {
        const int64_t row = args.map.row_of[slot];
        if (row < 0 || row >= used) continue;
        sum += (weighted ? args.prob[slot] : 1.0) * read_of_ranks(args.rows, row, h);
      }
      if (p.addend) sum += read(args.addend, t, h);
      write(args.tokens, {t, h}, sum);
    }
}

void gradients_of_prob(const PermuteProblem& p, const PermuteArgs& args, int64_t used) {
  for (int64_t slot = 0; slot < p.tokens * p.top_k; ++slot) {
    const int64_t row = args.map.row_of[slot];
    double sum = 0;
    if (row >= 0 && row < used && p.pass == PermutePass::kPermuteBackward)
      sum = double(args.drow_prob[row]) + (args.drow_scale ? args.drow_scale[row] : 0);
    if (row >= 0 && row < used && p.pass == PermutePass::kCombineBackward)
      for (int64_t h = 0; h < p.hidden; ++h)
        sum += read(args.tokens, slot / p.top_k, h) * read(args.y, row, h);
    args.dprob[slot] = float(sum);
  }
}

}  // namespace

void permute(const PermutePlan& plan, const PermuteArgs& args, Workspace, Stream) {
  const PermuteProblem& p = plan.problem;
  const bool by_row = reads_tokens(p.pass);
  const int64_t used = args.offsets.data != nullptr
                           ? schedule::rows_used(args.offsets.data, p.experts, p.rows)
                           : p.ranks * p.rows;
  if (p.format)
    codes_from_tokens(p, args, used);
  else if (by_row)
    rows_from_tokens(p, args, used);
  else
    tokens_from_rows(p, args, used);
  if (args.dprob != nullptr) gradients_of_prob(p, args, used);
}

}  // namespace cadre::cpu::reference
