#pragma once
#include <gtest/gtest.h>

#include <random>
#include <string_view>
#include <vector>

#include "cadre/permute.h"
#include "tests/judge/tensor.h"

namespace cadre::test {

/// The row map of a random routing, in which some choices are dropped.
struct RoutedRows {
  std::vector<int32_t> offsets, row_of, slot_of;

  RoutedRows(const PermuteProblem& p, unsigned seed)
      : offsets(size_t(p.experts) + 1),
        row_of(size_t(p.tokens * p.top_k)),
        slot_of(size_t(p.rows), -1) {
    std::mt19937 random(seed);
    std::vector<int32_t> experts(row_of.size());
    for (int32_t& e : experts) e = int32_t(random() % unsigned(p.experts + 1)) - 1;
    const OffsetsPlan made = plan({.source = OffsetsSource::kRouting,
                                   .rows = p.rows,
                                   .experts = p.experts,
                                   .tokens = p.tokens,
                                   .top_k = p.top_k},
                                  this_cpu(), "cpu_reference");
    run(made,
        {.source = experts.data(),
         .offsets = offsets.data(),
         .map = {.row_of = row_of.data(), .slot_of = slot_of.data()}},
        {}, {});
  }
};

/// One problem with its tensors. What is read is random where it may be read and NaN elsewhere;
/// what is written is poison.
struct PermuteCase {
  PermuteProblem p;
  RoutedRows routed;
  Tensor tokens, rows, y, addend, prob, row_prob, drow_prob, drow_scale, dprob;
  bool scaled = false;  ///< drow_scale is given

  PermuteCase(const PermuteProblem& problem, unsigned seed) : p(problem), routed(p, seed) {
    tokens = Tensor(p.dtype, {p.tokens, p.hidden}, {.row_gap = 3});
    rows = Tensor(p.dtype, {p.rows, p.hidden}, {.row_gap = 1});
    y = Tensor(p.dtype, {p.rows, p.hidden}, {.row_gap = 2});
    addend = Tensor(p.dtype, {p.tokens, p.hidden}, {.row_gap = 5});
    prob = Tensor(DType::kF32, {p.tokens, p.top_k});
    row_prob = Tensor(DType::kF32, {p.rows});
    drow_prob = Tensor(DType::kF32, {p.rows});
    drow_scale = Tensor(DType::kF32, {p.rows});
    dprob = Tensor(DType::kF32, {p.tokens, p.top_k});
    std::mt19937 random(seed);
    (writes_rows() ? tokens : rows).fill(random, -2, 2, 0, writes_rows() ? p.tokens : used());
    y.fill(random, -2, 2, 0, used());
    addend.fill(random, -2, 2);
    prob.fill(random, 0, 1);
    for (int64_t r = 0; r < used(); ++r) {
      drow_prob.set({r}, double(random() % 100) - 50);
      drow_scale.set({r}, double(random() % 100) / 64);
    }
    scaled = seed % 2;
  }
  bool writes_rows() const {
    return p.pass == PermutePass::kPermute || p.pass == PermutePass::kCombineBackward;
  }
  bool weighted() const {
    return p.prob && (p.pass == PermutePass::kCombine || p.pass == PermutePass::kCombineBackward);
  }
  int64_t used() const { return routed.offsets.back(); }
  int32_t row(int64_t t, int64_t j) const { return routed.row_of[size_t(t * p.top_k + j)]; }

  PermuteArgs args() {
    PermuteArgs given{.tokens = tokens.view(),
                      .rows = rows.view(),
                      .map = {routed.row_of.data(), routed.slot_of.data()},
                      .offsets = {routed.offsets.data(), p.experts}};
    if (p.addend) given.addend = addend.view();
    if (!p.prob) return given;
    if (p.pass != PermutePass::kPermuteBackward) given.prob = prob.data<float>();
    if (p.pass == PermutePass::kPermute) given.row_prob = row_prob.data<float>();
    if (p.pass == PermutePass::kPermuteBackward) given.drow_prob = drow_prob.data<float>();
    if (p.pass == PermutePass::kPermuteBackward && scaled)
      given.drow_scale = drow_scale.data<float>();
    if (p.pass == PermutePass::kPermuteBackward || p.pass == PermutePass::kCombineBackward)
      given.dprob = dprob.data<float>();
    if (p.pass == PermutePass::kCombineBackward) given.y = y.view();
    return given;
  }
  void launch(std::string_view only) {
    const PermutePlan made = plan(p, this_cpu(), only);
    EXPECT_EQ(made.name, only);
    run(made, args(), {}, {});
    EXPECT_EQ(tokens.damage() + rows.damage() + row_prob.damage() + dprob.damage(), "")
        << to_string(p);
  }
  std::vector<char> outputs() const {
    std::vector<char> all;
    for (const Tensor* t : {&tokens, &rows, &row_prob, &dprob})
      all.insert(all.end(), t->bytes().begin(), t->bytes().end());
    return all;
  }
};

}  // namespace cadre::test
