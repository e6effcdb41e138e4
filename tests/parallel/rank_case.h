#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "cadre/expert_parallel.h"
#include "tests/judge/tensor.h"

namespace cadre::test {

/// The tensors of one rank, or of one that has all tokens: forward, and backward of what experts
/// make of the rows.
struct RankCase {
  Tensor x, prob, rows, row_prob, y, out, dout, dy, drows, drow_prob, dx, dprob;
  std::vector<int32_t> experts, offsets, row_of, slot_of, row_here, routed, verdict, place_of;

  RankCase(const ExpertParallelProblem& p, int64_t tokens)
      : x(p.dtype, {tokens, p.hidden}, {.row_gap = 3}),
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
        place_of(p.push ? slot_of : std::vector<int32_t>()) {}

  int64_t tokens() const { return x.rows(); }
  int64_t used() const { return offsets.back(); }
  ExchangeMap map() {
    return {row_of.data(),  slot_of.data(), row_here.data(),
            offsets.data(), verdict.data(), place_of.data()};
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
  DispatchBackwardArgs dispatch_backward_args(bool with_prob) {
    return {.drows = drows.view(),
            .drow_prob = with_prob ? drow_prob.data<float>() : nullptr,
            .dx = dx.view(),
            .dprob = with_prob ? dprob.data<float>() : nullptr,
            .map = map()};
  }
  std::string damage() const {
    return rows.damage() + row_prob.damage() + out.damage() + dy.damage() + dx.damage() +
           dprob.damage();
  }
};

}  // namespace cadre::test
