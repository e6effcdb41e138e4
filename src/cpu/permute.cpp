#include "cpu/permute.h"

#include <algorithm>
#include <cstring>

#include "cpu/lanes.h"
#include "cpu/load_store.h"
#include "cpu/threads.h"
#include "schedule/expert_rows.h"

namespace cadre::cpu {
namespace {

constexpr int kBlock = 256;  // columns at a time
using Block = Lanes<kBlock>;

/// What is the same for all rows and tokens.
struct Work {
  const PermuteProblem& p;
  const PermuteArgs& args;
  int64_t used;   ///< rows at or beyond are the tail
  int64_t slots;  ///< that a row may have
  LoadRun load = load_run(p.dtype);
  StoreRun store = store_run(p.dtype);

  Run columns(int64_t first) const {
    return {first, 1, int(std::min<int64_t>(kBlock, p.hidden - first))};
  }
  bool has_row(int64_t slot) const {
    const int32_t row = args.map.row_of[slot];
    return row >= 0 && row < used;
  }
};

void copy_row(const Work& work, int64_t row, int64_t token) {
  std::memcpy(row_address(work.args.rows, row), rank_row_address(work.args.tokens, token),
              size_t(bytes_for(work.args.rows.dtype, work.p.hidden)));
}

/// The scales of a row of codes: those of a token, or zeros where there is none.
void write_scales(const TensorView& to, int64_t row, const void* from) {
  const int64_t bytes = bits(to.dtype) / 8;
  const bool in_a_row = to.stride[1] == 1;
  const int64_t count = in_a_row ? 1 : to[1], length = in_a_row ? to[1] * bytes : bytes;
  for (int64_t i = 0; i < count; ++i) {
    char* at = static_cast<char*>(to.data) + (row * to.stride[0] + i * to.stride[1]) * bytes;
    if (from == nullptr)
      std::memset(at, 0, size_t(length));
    else
      std::memcpy(at, static_cast<const char*>(from) + i * length, size_t(length));
  }
}

void scale_row(const Work& work, int64_t row, int64_t token, float factor) {
  Block x;
  for (int64_t first = 0; first < work.p.hidden; first += kBlock) {
    const Run columns = work.columns(first);
    work.load(rank_row_address(work.args.tokens, token), columns, x.at);
    for (int i = 0; i < columns.count; ++i) x.at[i] *= factor;
    work.store(row_address(work.args.rows, row), columns, x.at);
  }
}

void row_from_token(const Work& work, int64_t row) {
  const int64_t slot = work.args.map.slot_of[row];
  const bool known = slot >= 0 && slot < work.slots;
  if (work.args.row_prob != nullptr) work.args.row_prob[row] = known ? work.args.prob[slot] : 0;
  const int64_t token = slot / work.p.top_k;
  if (work.p.format)
    write_scales(work.args.row_scales, row,
                 known ? rank_row_address(work.args.token_scales, token) : nullptr);
  if (!known)
    zero_row(work.args.rows, row);
  else if (work.p.prob && work.p.pass == PermutePass::kCombineBackward)
    scale_row(work, row, token, work.args.prob[slot]);
  else
    copy_row(work, row, token);
}

void token_from_rows(const Work& work, int64_t token) {
  const bool weighted = work.p.prob && work.p.pass == PermutePass::kCombine;
  for (int64_t first = 0; first < work.p.hidden; first += kBlock) {
    const Run columns = work.columns(first);
    Block sum{}, x;
    for (int64_t slot = token * work.p.top_k; slot < (token + 1) * work.p.top_k; ++slot) {
      if (!work.has_row(slot)) continue;
      const float factor = weighted ? work.args.prob[slot] : 1.0f;
      const int64_t row = work.args.map.row_of[slot];
      work.load(rank_row_address(work.args.rows, row), columns, x.at);
      add_scaled(sum.at, x.at, factor, columns.count);
    }
    if (work.p.addend) {
      work.load(row_address(work.args.addend, token), columns, x.at);
      add_scaled(sum.at, x.at, 1.0f, columns.count);
    }
    work.store(row_address(work.args.tokens, token), columns, sum.at);
  }
}

/// A row's gradient of its probability, and of the same probability where it scales a bias.
float row_gradient(const PermuteArgs& args, int64_t row) {
  const float drow_prob = args.drow_prob[row];
  return args.drow_scale == nullptr ? drow_prob : drow_prob + args.drow_scale[row];
}

/// <tokens[t], y[row]> in 256 sums, added up in a fixed order.
float product(const Work& work, int64_t token, int64_t row) {
  Block sum{}, x, y;
  for (int64_t first = 0; first < work.p.hidden; first += kBlock) {
    const Run columns = work.columns(first);
    work.load(row_address(work.args.tokens, token), columns, x.at);
    work.load(row_address(work.args.y, row), columns, y.at);
    add_products(sum.at, x.at, y.at, columns.count);
  }
  return total(sum);
}

void gradients_of_prob(const Work& work, int64_t token) {
  for (int64_t slot = token * work.p.top_k; slot < (token + 1) * work.p.top_k; ++slot) {
    float& dprob = work.args.dprob[slot];
    if (!work.has_row(slot))
      dprob = 0;
    else if (work.p.pass == PermutePass::kPermuteBackward)
      dprob = row_gradient(work.args, work.args.map.row_of[slot]);
    else
      dprob = product(work, token, work.args.map.row_of[slot]);
  }
}

}  // namespace

void permute(const PermutePlan& plan, const PermuteArgs& args, Workspace, Stream) {
  const PermuteProblem& p = plan.problem;
  const bool by_row = reads_tokens(p.pass);
  const int64_t used = args.offsets.data != nullptr
                           ? schedule::rows_used(args.offsets.data, p.experts, p.rows)
                           : p.ranks * p.rows;
  const int64_t choices = p.tokens * p.top_k;
  const Work work{.p = p, .args = args, .used = used, .slots = p.ranks * choices};
  if (by_row) {
#pragma omp parallel for schedule(static) if (worth_threads(used * p.hidden))
    for (int64_t r = 0; r < used; ++r) row_from_token(work, r);
    if (p.tail == Tail::kZero) {
      zero_rows(args.rows, used, p.rows);
      for (int64_t r = used; r < p.rows && p.format; ++r) write_scales(args.row_scales, r, nullptr);
      if (args.row_prob != nullptr) std::fill(args.row_prob + used, args.row_prob + p.rows, 0.0f);
    }
  } else {
#pragma omp parallel for schedule(static) if (worth_threads(choices * p.hidden))
    for (int64_t t = 0; t < p.tokens; ++t) token_from_rows(work, t);
  }
  if (args.dprob == nullptr) return;
#pragma omp parallel for schedule(static) if (worth_threads(choices * p.hidden))
  for (int64_t t = 0; t < p.tokens; ++t) gradients_of_prob(work, t);
}

}  // namespace cadre::cpu
