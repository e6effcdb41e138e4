#pragma once
#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cadre/dequantize.h"
#include "cadre/expert_parallel.h"
#include "tests/judge/tensor.h"
#include "tests/judge/threads.h"
#include "tests/judge/workspace.h"

namespace cadre::test {

/// Of few tokens, with room for whatever they choose.
inline ExpertParallelProblem random_exchange(int ranks, std::mt19937& random) {
  ExpertParallelProblem p{.tokens = int64_t(random() % 24), .top_k = int(1 + random() % 4)};
  p.hidden = int64_t(1 + random() % 40);
  p.experts = int(1 + random() % 5);
  p.ranks = ranks;
  p.rows = p.ranks * p.tokens * p.top_k;
  p.dtype = std::array{DType::kF32, DType::kBf16, DType::kF16}[random() % 3];
  p.prob = random() % 4 != 0;
  return p;
}

/// The tensors of one rank, or of one that has all tokens: forward, and backward of what experts
/// make of the rows.
struct RankCase {
  ExpertParallelProblem p;
  Tensor x, prob, rows, row_prob, y, out, dout, dy, drows, drow_prob, dx, dprob;
  Tensor x_codes, x_scales, row_codes, row_scales;  ///< where x is codes
  std::vector<int32_t> experts, offsets, row_of, slot_of, row_here, routed, verdict, place_of,
      sum_of;

  RankCase(const ExpertParallelProblem& problem, int64_t tokens)
      : p(problem),
        x(p.dtype, {tokens, p.hidden}, {.row_gap = 3}),
        prob(DType::kF32, {tokens, p.top_k}),
        rows(p.dtype, {p.rows, p.hidden}, {.row_gap = 1}),
        row_prob(DType::kF32, {p.rows}),
        y(p.dtype, {p.rows, p.hidden}, {.row_gap = 2}),
        out(p.dtype, {tokens, p.hidden}, {.row_gap = 1}),
        dout(p.dtype, {tokens, p.hidden}),
        dy(p.dtype, {p.rows, p.hidden}, {.row_gap = 4}),
        drows(p.dtype, {p.rows, p.hidden}),
        drow_prob(DType::kF32, {p.rows}),
        dx(p.dtype, {tokens, p.hidden}, {.row_gap = 5}),
        dprob(DType::kF32, {tokens, p.top_k}),
        experts(size_t(tokens * p.top_k)),
        offsets(size_t(p.experts) + 1, -7),
        row_of(experts.size(), -7),
        slot_of(size_t(p.rows), -7),
        row_here(size_t(p.ranks * p.tokens * p.top_k), -7),
        routed(size_t(p.ranks), -7),
        verdict(1, -7),
        place_of(p.push ? slot_of : std::vector<int32_t>()),
        sum_of(p.sum == RowSum::kRank ? size_t(tokens * p.ranks) : 0, 0) {
    if (!p.x) return;
    const TensorView scales = quantized_view(shape(tokens), nullptr).scales;
    x_codes = Tensor(p.x->element, {tokens, p.hidden}, {.row_gap = 6});
    x_scales = Tensor(scales.dtype, {tokens, scales[1]}, {.row_gap = 2});
    row_codes = Tensor(p.x->element, {p.rows, p.hidden}, {.row_gap = 10});
    row_scales = p.scales_major == Major::kRow
                     ? Tensor(scales.dtype, {p.rows, scales[1]}, {.row_gap = 4})
                     : Tensor(scales.dtype, {scales[1], p.rows}, {.row_gap = 4 - p.rows % 4});
  }

  int64_t tokens() const { return x.rows(); }
  int64_t used() const { return offsets.back(); }
  ExchangeMap map() {
    return {row_of.data(),  slot_of.data(),  row_here.data(), offsets.data(),
            verdict.data(), place_of.data(), sum_of.data()};
  }
  QuantizedView codes_of_rows() const {
    const TensorView scales = row_scales.view();
    return {.codes = row_codes.view(),
            .scales = p.scales_major == Major::kRow ? scales : transposed(scales)};
  }
  QuantizedShape shape(int64_t of_rows) const {
    return {.rows = of_rows,
            .cols = p.hidden,
            .experts = p.experts,
            .format = *p.x,
            .scales_major = p.scales_major};
  }
  /// Of numbers: codes of x, or of the rows that one rank has dispatched as numbers.
  void quantize_x() const {
    const int32_t ends[] = {0, int32_t(tokens())};
    quantize(x, {.codes = x_codes.view(), .scales = x_scales.view()}, {ends, 1}, Major::kRow);
  }
  void quantize_rows() const {
    quantize(rows, codes_of_rows(), {offsets.data(), p.experts}, p.scales_major);
  }
  /// Rows as the numbers that their codes say. By one thread, since a process that was forked has
  /// no other.
  void decode_rows() const {
    const Threads one(1);
    const DequantizePlan made = plan({.source = shape(p.rows), .out = p.dtype}, this_cpu());
    run(made,
        {.source = codes_of_rows(), .offsets = {offsets.data(), p.experts}, .out = rows.view()},
        OwnedWorkspace(made.workspace_bytes).get(), {});
  }
  DispatchArgs dispatch_args(bool with_prob) {
    return {.x = x.view(),
            .experts = experts.data(),
            .prob = with_prob ? prob.data<float>() : nullptr,
            .rows = rows.view(),
            .row_prob = with_prob ? row_prob.data<float>() : nullptr,
            .routed = routed.data(),
            .map = map()};
  }
  /// The same of codes.
  DispatchArgs code_args(bool with_prob) {
    DispatchArgs args = dispatch_args(with_prob);
    args.x = x_codes.view(), args.x_scales = x_scales.view();
    args.rows = row_codes.view(), args.row_scales = codes_of_rows().scales;
    return args;
  }
  DispatchBackwardArgs dispatch_backward_args(bool with_prob) {
    return {.drows = drows.view(),
            .drow_prob = with_prob ? drow_prob.data<float>() : nullptr,
            .dx = dx.view(),
            .dprob = with_prob ? dprob.data<float>() : nullptr,
            .map = map()};
  }
  std::string damage() const {
    return rows.damage() + row_prob.damage() + out.damage() + dy.damage() + dx.damage() +
           dprob.damage() + row_codes.damage() + row_scales.damage();
  }

 private:
  void quantize(const Tensor& from, const QuantizedView& to, const Offsets& of,
                Major scales_major) const {
    const Threads one(1);
    const QuantizePlan made = plan({.rows = from.rows(),
                                    .cols = p.hidden,
                                    .experts = of.experts,
                                    .source = p.dtype,
                                    .along_k = p.x,
                                    .along_k_scales_major = scales_major},
                                   this_cpu());
    run(made, {.source = from.view(), .offsets = of, .along_k = to},
        OwnedWorkspace(made.workspace_bytes).get(), {});
  }
};

}  // namespace cadre::test
