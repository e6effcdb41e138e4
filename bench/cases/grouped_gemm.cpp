#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "bench/cases/quantized.h"

namespace cadre::bench {
namespace {

using Problem = GroupedGemmProblem;

// A matrix of that order, or one an expert where there are some.
TensorView matrix(Buffers& buffers, DType dtype, std::array<int64_t, 3> shape, Major major) {
  const bool column = major == Major::kColumn;
  if (column) std::swap(shape[1], shape[2]);
  const TensorView v = shape[0] == 0 ? buffers.tensor(dtype, {shape[1], shape[2]})
                                     : buffers.tensor(dtype, {shape[0], shape[1], shape[2]});
  return column ? transposed(v) : v;
}

TensorView plain_operand(Buffers& buffers, const QuantizedShape& s, const Rows& rows,
                         uint64_t seed) {
  const bool ragged = s.kind == RowsKind::kRagged;
  const TensorView v =
      matrix(buffers, s.format.element, {ragged ? 0 : s.experts, s.rows, s.cols}, s.codes_major);
  fill_normal(v, ragged ? rows.live() : s.experts, seed);
  return v;
}

int64_t expert_stride_bytes(const TensorView& v) { return bytes_for(v.dtype, v.stride[0]); }

Operand random_operand(Buffers& buffers, const QuantizedShape& s, const Rows& rows, uint64_t seed) {
  if (is_plain(s.format)) return {.codes = plain_operand(buffers, s, rows, seed), .scales = {}};
  const QuantizedView v = random_quantized(buffers, s, rows, seed).view;
  return {.codes = v.codes, .scales = v.scales, .expert_scale = v.expert_scale};
}

Slots slots_of(const Problem& p) { return {p.rows, p.tokens, p.top_k}; }

// An operand of tokens, or of rows.
Operand random_operand(GroupedGemmCase& c, Gather operand, const Rows& rows, uint64_t seed) {
  const Problem& p = c.problem;
  const QuantizedShape s = operand == Gather::kLhs ? lhs_shape(p) : rhs_shape(p);
  const Rows tokens{.offsets = {}, .host = {int32_t(p.tokens)}};
  return random_operand(*c.buffers, s, p.gather == operand ? tokens : rows, seed);
}

// The same operand as E pointers.
void make_discrete(Buffers& buffers, Operand& o, int experts) {
  o.discrete = pointers(buffers, true, o.codes.data, expert_stride_bytes(o.codes), experts);
  o.codes.data = nullptr;
  if (!o.scales) return;
  o.discrete_scales =
      pointers(buffers, true, o.scales.data, expert_stride_bytes(o.scales), experts);
  o.scales.data = nullptr;
}

void make_output(GroupedGemmCase& c, const Rows& rows, uint64_t seed) {
  const Problem& p = c.problem;
  Buffers& buffers = *c.buffers;
  const bool weights = p.pass == Pass::kWgrad;
  const int64_t ranks = p.ranks > 1 ? p.ranks : 0, places = p.tokens * p.top_k;
  const TensorView out =
      weights ? matrix(buffers, p.out, {p.experts, p.n, p.k}, p.out_major)
              : matrix(buffers, p.out, {ranks, p.scatter ? places : p.rows, out_columns(p)},
                       p.out_major);
  const int64_t live = weights ? p.experts : rows.live();
  const char* fprop = p.activation ? "h" : "y";
  c.outputs.push_back({weights ? "dw" : p.pass == Pass::kFprop ? fprop : "dx", out, live, p.tail});
  c.outputs.back().exact = is_composed(p) || p.scatter;
  c.args.accumulate = accumulate_words(buffers, p.accumulate, p.experts, seed);
  fill_old(weights ? out : TensorView(), p.accumulate, c.args.accumulate, seed);
  c.args.out = out;
  c.args.discrete_out =
      pointers(buffers, p.discrete_out, out.data, expert_stride_bytes(out), p.experts);
  if (p.discrete_out) c.args.out.data = nullptr;
}

void make_epilogue(GroupedGemmCase& c, const Rows& rows, Seeds& seeds) {
  const Problem& p = c.problem;
  Buffers& buffers = *c.buffers;
  GroupedGemmArgs& args = c.args;
  if (p.alpha) args.alpha = random_floats(buffers, p.experts, p.experts, seeds.next(), 1);
  if (p.beta) {
    args.beta = random_floats(buffers, p.experts, p.experts, seeds.next(), 1);
    args.c = matrix(buffers, p.out, {0, p.rows, p.pass == Pass::kFprop ? p.n : p.k}, p.out_major);
    fill_normal(args.c, rows.live(), seeds.next());
  }
  if (p.bias) {
    args.bias = random_tensor(buffers, p.bias_dtype, {p.experts, p.n}, p.experts, seeds.next());
    args.discrete_bias = pointers(buffers, p.discrete_bias, args.bias.data,
                                  expert_stride_bytes(args.bias), p.experts);
    if (p.discrete_bias) args.bias.data = nullptr;
  }
  if (p.bias_scale) args.bias_scale = random_floats(buffers, p.rows, rows.live(), seeds.next());
}

// What an activation takes and leaves besides h.
void make_activation(GroupedGemmCase& c, const Rows& rows, Seeds& seeds) {
  const Problem& p = c.problem;
  if (!p.activation) return;
  if (p.activation->prob)
    c.args.prob = random_floats(*c.buffers, p.rows, rows.live(), seeds.next());
  if (!p.activation->keep_z) return;
  c.args.z = matrix(*c.buffers, p.out, {0, p.rows, p.n}, Major::kRow);
  c.outputs.push_back({"z", c.args.z, rows.live(), p.tail, true});
}

// |operand| in f32, row-major and packed.
Operand absolute_operand(Buffers& buffers, const QuantizedShape& s, Operand o,
                         const Offsets& rows) {
  if (o.discrete) o.codes.data = const_cast<void*>(o.discrete[0]);
  if (o.discrete_scales) o.scales.data = const_cast<void*>(o.discrete_scales[0]);
  if (is_plain(s.format)) return {.codes = absolute(buffers, o.codes), .scales = {}};
  const QuantizedView v{o.codes, o.scales, const_cast<float*>(o.expert_scale)};
  return {.codes = absolute_values(buffers, s, v, rows), .scales = {}};
}

// The rows of decoded operands that belong to each expert: those of their transformed blocks where
// there are such. What lies between one expert's blocks and the next one's is zero.
Offsets contracted_rows(Buffers& buffers, const GroupedGemmCase& c) {
  const QuantizedShape s = lhs_shape(c.problem);
  auto* data = buffers.array<int32_t>(s.experts + 1);
  for (int e = 0; e <= s.experts; ++e)
    data[e] = int32_t(code_rows(s.format, s.axis, {c.offsets[size_t(e)], 0}, e).first);
  return {data, s.experts};
}

/// A dense problem's one expert has all rows.
Rows rows_of(const GroupedGemmCase& c, const Draw& draw) {
  const Problem& p = c.problem;
  return draw_rows(*c.buffers, p.dense ? Draw{.seed = draw.seed} : draw, p.rows, p.experts);
}

}  // namespace

template <>
GroupedGemmCase make_case(const GroupedGemmProblem& p, const Draw& draw) {
  auto c = new_case<GroupedGemmCase>(p, draw);
  Seeds seeds(draw);
  const Rows rows = rows_of(c, draw);
  c.offsets = rows.host;
  if (!p.dense) c.args.offsets = rows.offsets;
  c.args.lhs = random_operand(c, Gather::kLhs, rows, seeds.next());
  c.args.rhs = random_operand(c, Gather::kRhs, rows, seeds.next());
  if (p.discrete_rhs) make_discrete(*c.buffers, c.args.rhs, p.experts);
  make_output(c, rows, seeds.next());
  make_epilogue(c, rows, seeds);
  make_activation(c, rows, seeds);
  if (p.gather != Gather::kNo)
    c.args.slot_of = random_slots(*c.buffers, rows, slots_of(p), seeds.next());
  if (p.scatter)
    c.args.place_of =
        random_places(*c.buffers, rows, {p.rows, p.ranks, p.tokens * p.top_k}, seeds.next());
  return c;
}

void scatter_rows(const GroupedGemmCase& from, GroupedGemmCase& to) {
  const GroupedGemmProblem& p = to.problem;
  const int64_t places = p.tokens * p.top_k, bytes = bytes_for(p.out, out_columns(p));
  const auto at = [&](const TensorView& v, int64_t rank, int64_t row) {
    const int64_t step = v.stride[size_t(v.rank) - 2];
    return static_cast<char*>(v.data) + bytes_for(p.out, rank * v.stride[0] + row * step);
  };
  for (int64_t r = 0; r < to.offsets.back(); ++r)
    if (const int64_t place = to.args.place_of[r]; place >= 0 && place < p.ranks * places)
      std::memcpy(at(to.args.out, place / places, place % places), at(from.args.out, 0, r),
                  size_t(bytes));
}

void permute_first(GroupedGemmCase& c) {
  const Problem p = c.problem;
  if (p.gather == Gather::kNo) return;
  TensorView& operand = (p.gather == Gather::kLhs ? c.args.lhs : c.args.rhs).codes;
  const TensorView tokens = operand;
  operand = c.buffers->tensor(tokens.dtype, {p.rows, tokens[1]});
  copy_rows(operand, tokens, c.args.slot_of, slots_of(p), c.offsets.back());
  c.args.slot_of = nullptr;
  c.problem = without_gather(p);
}

template <>
int64_t shrink(GroupedGemmProblem& p) {
  const double share = affordable(p.rows, double(p.n) * double(p.k), kProductsOfASecond);
  scale(p.rows, share);
  scale(p.tokens, share);
  return p.rows;
}

template <>
std::vector<Magnitude> magnitudes(const GroupedGemmCase& c) {
  const Problem& p = c.problem;
  if (is_composed(p) || p.scatter) return std::vector<Magnitude>(c.outputs.size());  // exact
  Buffers buffers;
  Problem sizes;
  sizes.pass = p.pass;
  sizes.rows = p.rows;
  sizes.n = p.n;
  sizes.k = p.k;
  sizes.experts = p.experts;
  sizes.lhs = sizes.rhs = format(FormatKind::kF32);
  sizes.out = sizes.bias_dtype = DType::kF32;
  sizes.alpha = p.alpha;
  sizes.beta = p.beta;
  sizes.bias = p.bias;
  sizes.bias_scale = p.bias_scale;
  sizes.accumulate = p.pass == Pass::kWgrad ? Accumulate::kYes : Accumulate::kNo;
  GroupedGemmArgs args;
  const Offsets rows{c.offsets.data(), p.experts};
  args.lhs = absolute_operand(buffers, lhs_shape(p), c.args.lhs, rows);
  args.rhs = absolute_operand(buffers, rhs_shape(p), c.args.rhs, rows);
  args.offsets = contracted_rows(buffers, c);
  sizes.rows = args.lhs.codes[0];
  args.out = absolute_old(buffers, c.outputs[0].view, p.accumulate, c.args.accumulate);
  args.alpha = absolute(buffers, c.args.alpha, p.experts);
  args.beta = absolute(buffers, c.args.beta, p.experts);
  if (p.beta) args.c = absolute(buffers, c.args.c);
  TensorView bias = c.args.bias;
  if (p.discrete_bias) bias.data = const_cast<void*>(c.args.discrete_bias[0]);
  if (p.bias) args.bias = absolute(buffers, bias);
  args.bias_scale = absolute(buffers, c.args.bias_scale, p.rows);
  run_on_cpu(sizes, args, "cpu_reference");
  int64_t length = p.pass == Pass::kFprop ? p.k : p.n;
  if (p.pass == Pass::kWgrad) {
    length = 0;
    for (int e = 0; e < p.experts; ++e)
      length = std::max<int64_t>(length, c.offsets[size_t(e) + 1] - c.offsets[size_t(e)]);
  }
  return {{values_of(args.out), length + 8}};
}

template <>
Work work(const GroupedGemmCase& c) {
  const Problem& p = c.problem;
  const auto live = double(c.offsets.back());
  int busy = 0;
  for (int e = 0; e < p.experts; ++e) busy += c.offsets[size_t(e) + 1] > c.offsets[size_t(e)];
  const auto operand = [&](const QuantizedShape& s) {
    const double share = s.kind == RowsKind::kRagged ? live / double(std::max<int64_t>(s.rows, 1))
                                                     : double(busy) / p.experts;
    return double(quantized_bytes(s)) * std::min(share, 1.0);  // tokens have several rows
  };
  double out = 0;
  for (const Output& o : c.outputs) out += live_bytes(o.view, o.live);
  const bool reads_out = p.accumulate == Accumulate::kYes;
  return {.flops = 2 * live * double(p.n) * double(p.k),
          .bytes = operand(lhs_shape(p)) + operand(rhs_shape(p)) + (reads_out ? 2 : 1) * out};
}

}  // namespace cadre::bench
