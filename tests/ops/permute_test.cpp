#include "cadre/permute.h"

#include <gtest/gtest.h>

#include <array>
#include <numeric>

#include "tests/judge/close.h"
#include "tests/judge/errors.h"
#include "tests/judge/tensor.h"
#include "tests/judge/threads.h"
#include "tests/judge/workspace.h"
#include "tests/ops/permute_case.h"

using namespace cadre;
using test::gamma;
using test::rounding;
using test::Tensor;

namespace {

using Case = test::PermuteCase;

/// The sums that write tokens, and their bounds: each product and each addition rounds once.
void check_tokens(const Case& got, const Case& want) {
  const PermuteProblem& p = got.p;
  std::vector<double> bound;
  for (int64_t t = 0; t < p.tokens; ++t)
    for (int64_t h = 0; h < p.hidden; ++h) {
      double magnitude = p.addend ? std::abs(got.addend.at(t, h)) : 0;
      for (int64_t j = 0; j < p.top_k; ++j)
        if (got.row(t, j) >= 0)
          magnitude +=
              std::abs(got.rows.at(got.row(t, j), h) * (got.weighted() ? got.prob.at(t, j) : 1));
      bound.push_back(gamma(p.top_k + 2, magnitude) + 2 * rounding(p.dtype, want.tokens.at(t, h)));
    }
  EXPECT_EQ(test::difference(got.tokens.values(), want.tokens.values(), bound, p.hidden), "")
      << to_string(p);
}

void check_rows(const Case& got, const Case& want) {
  const PermuteProblem& p = got.p;
  for (int64_t r = 0; r < p.rows; ++r) {
    const bool tail = r >= got.used();
    if (tail && p.tail == Tail::kKeep) {
      EXPECT_TRUE(got.rows.untouched(r, r + 1) && want.rows.untouched(r, r + 1));
      continue;
    }
    for (int64_t h = 0; h < p.hidden; ++h) {
      const double w = want.rows.at(r, h);
      const double slack = gamma(1, std::abs(w)) + 2 * rounding(p.dtype, w);
      EXPECT_NEAR(got.rows.at(r, h), w, got.weighted() ? slack : 0.0) << to_string(p);
      EXPECT_TRUE(!tail || w == 0) << to_string(p);
    }
  }
  EXPECT_EQ(got.row_prob.bytes(), want.row_prob.bytes()) << to_string(p);
  for (int64_t r = got.used(); p.prob && p.pass == PermutePass::kPermute && r < p.rows; ++r)
    EXPECT_TRUE(p.tail == Tail::kZero ? want.row_prob.at(r) == 0 : std::isnan(want.row_prob.at(r)));
}

void check_dprob(const Case& got, const Case& want) {
  const PermuteProblem& p = got.p;
  std::vector<double> bound;
  for (int64_t t = 0; t < p.tokens; ++t)
    for (int64_t j = 0; j < p.top_k; ++j) {
      const int32_t row = got.row(t, j);
      double magnitude = 0;
      for (int64_t h = 0; h < p.hidden && row >= 0 && got.weighted(); ++h)
        magnitude += std::abs(got.tokens.at(t, h) * got.y.at(row, h));
      bound.push_back(row < 0 || !got.weighted() ? 0 : gamma(p.hidden / 256 + 10, magnitude));
      EXPECT_TRUE(row >= 0 || want.dprob.at(t, j) == 0) << to_string(p);
    }
  EXPECT_EQ(test::difference(got.dprob.values(), want.dprob.values(), bound, p.top_k), "")
      << to_string(p);
}

void check(const PermuteProblem& p, unsigned seed) {
  Case got(p, seed), want(p, seed);
  got.launch("cpu");
  want.launch("cpu_reference");
  if (got.writes_rows()) {
    check_rows(got, want);
  } else {
    check_tokens(got, want);
  }
  const bool backward =
      p.pass == PermutePass::kPermuteBackward || p.pass == PermutePass::kCombineBackward;
  if (p.prob && backward) check_dprob(got, want);
}

bool writes_sums(PermutePass pass) {
  return pass == PermutePass::kCombine || pass == PermutePass::kPermuteBackward;
}

struct EveryPass : testing::TestWithParam<PermutePass> {};

TEST_P(EveryPass, FastIsReferenceWithinTheBound) {
  unsigned seed = 1;
  for (DType dtype : {DType::kF32, DType::kBf16, DType::kF16})
    for (int64_t tokens : {0, 1, 13})
      for (int top_k : {1, 3})
        for (int64_t hidden : {1, 64, 131})
          for (int64_t rows : {int64_t(0), tokens * top_k / 2, tokens * top_k + 4}) {
            PermuteProblem p{.pass = GetParam(),
                             .tokens = tokens,
                             .top_k = top_k,
                             .rows = rows,
                             .hidden = hidden,
                             .experts = int(1 + seed % 5),
                             .dtype = dtype};
            for (Tail tail : {Tail::kKeep, Tail::kZero}) {
              p.tail = tail;
              p.prob = seed % 3 != 0;
              p.addend = seed % 2 && writes_sums(p.pass);
              check(p, seed++);
            }
          }
}

TEST_P(EveryPass, DoesNotDependOnTheThreads) {
  const PermuteProblem p{.pass = GetParam(),
                         .tokens = 71,
                         .top_k = 2,
                         .rows = 140,
                         .hidden = 100,
                         .experts = 7,
                         .prob = true};
  Case want(p, 3);
  {
    const test::Threads one(1);
    want.launch("cpu");
  }
  for (int threads : {2, 3, 5}) {
    const test::Threads set(threads);
    Case got(p, 3);
    got.launch("cpu");
    EXPECT_EQ(got.outputs(), want.outputs()) << threads;
  }
}

TEST_P(EveryPass, BrokenMapsAndOffsetsStayInside) {
  std::mt19937 random(9);
  for (int32_t end : {-1, 3, 9, 2147483647})
    for (const char* name : {"cpu", "cpu_reference"}) {
      Case c({.pass = GetParam(),
              .tokens = 5,
              .top_k = 2,
              .rows = 8,
              .hidden = 9,
              .experts = 2,
              .prob = true,
              .tail = Tail::kZero},
             4);
      c.routed.offsets.back() = end;
      for (int32_t& row : c.routed.row_of) row = int32_t(random());
      for (int32_t& slot : c.routed.slot_of) slot = int32_t(random());
      c.launch(name);  // sees its canaries
    }
}

INSTANTIATE_TEST_SUITE_P(Permute, EveryPass,
                         testing::Values(PermutePass::kPermute, PermutePass::kPermuteBackward,
                                         PermutePass::kCombine, PermutePass::kCombineBackward));

/// A forward pass in f32 by the reference, with other tokens, rows or probabilities.
double weighted_sum(Case c, PermutePass pass, const Tensor& weights) {
  c.p.pass = pass;
  const bool permute = pass == PermutePass::kPermute;
  (permute ? c.rows : c.tokens) =
      Tensor(DType::kF32, {permute ? c.p.rows : c.p.tokens, c.p.hidden});
  c.launch("cpu_reference");
  const Tensor& out = permute ? c.rows : c.tokens;
  double sum = 0;
  for (int64_t r = 0; r < (permute ? c.used() : c.p.tokens); ++r)
    for (int64_t h = 0; h < c.p.hidden; ++h) sum += out.at(r, h) * weights.at(r, h);
  return sum;
}

const PermuteProblem kSmall{.pass = PermutePass::kPermute,
                            .tokens = 4,
                            .top_k = 2,
                            .rows = 8,
                            .hidden = 3,
                            .experts = 3,
                            .dtype = DType::kF32,
                            .prob = true};

// Both passes are linear in what moves, so a difference is the gradient up to fp32.
TEST(Permute, BackwardIsTheLimitOfDifferences) {
  PermuteProblem p = kSmall;
  p.pass = PermutePass::kPermuteBackward;
  Case backward(p, 11);
  backward.launch("cpu");
  p.pass = PermutePass::kPermute;
  Case forward(p, 11);
  for (int64_t t = 0; t < p.tokens; ++t)
    for (int64_t h = 0; h < p.hidden; ++h) {
      Case above = forward, below = forward;
      above.tokens.set({t, h}, forward.tokens.at(t, h) + 0.5);
      below.tokens.set({t, h}, forward.tokens.at(t, h) - 0.5);
      const double slope =
          weighted_sum(above, p.pass, backward.rows) - weighted_sum(below, p.pass, backward.rows);
      EXPECT_NEAR(backward.tokens.at(t, h), slope, 1e-5);
    }
}

TEST(Permute, CombineBackwardIsTheLimitOfDifferences) {
  PermuteProblem p = kSmall;
  p.pass = PermutePass::kCombineBackward;
  Case backward(p, 12);
  backward.launch("cpu");
  Case forward = backward;
  forward.rows = backward.y;  // combine reads y
  const auto slope = [&](auto change) {
    Case above = forward, below = forward;
    change(above, 0.5), change(below, -0.5);
    return weighted_sum(above, PermutePass::kCombine, backward.tokens) -
           weighted_sum(below, PermutePass::kCombine, backward.tokens);
  };
  for (int64_t r = 0; r < backward.used(); ++r)
    for (int64_t h = 0; h < p.hidden; ++h)
      EXPECT_NEAR(backward.rows.at(r, h), slope([&](Case& c, double step) {
                    c.rows.set({r, h}, forward.rows.at(r, h) + step);
                  }),
                  1e-5);
  for (int64_t t = 0; t < p.tokens; ++t)
    for (int64_t j = 0; j < p.top_k; ++j)
      EXPECT_NEAR(backward.dprob.at(t, j), slope([&](Case& c, double step) {
                    c.prob.set({t, j}, forward.prob.at(t, j) + step);
                  }),
                  1e-5);
}

TEST(Permute, BackwardAddsBothGradientsOfAProbability) {
  PermuteProblem p = kSmall;
  p.pass = PermutePass::kPermuteBackward;
  for (const char* name : {"cpu", "cpu_reference"}) {
    Case c(p, 13);
    ASSERT_TRUE(c.scaled);
    c.launch(name);
    for (int64_t t = 0; t < p.tokens; ++t)
      for (int64_t j = 0; j < p.top_k; ++j) {
        const int32_t row = c.row(t, j);
        const auto want = row < 0 ? 0.0f : float(c.drow_prob.at(row) + c.drow_scale.at(row));
        EXPECT_EQ(c.dprob.at(t, j), want) << name;
      }
  }
}

/// Expects the sum of a token's two rows and the addend.
void check_sum(DType dtype, std::array<double, 2> rows, double addend, double want) {
  for (const PermutePass pass : {PermutePass::kCombine, PermutePass::kPermuteBackward})
    for (const char* name : {"cpu", "cpu_reference"}) {
      PermuteProblem p = kSmall;
      p.pass = pass;
      p.experts = 1;
      p.dtype = dtype;
      p.prob = false;
      p.addend = true;
      Case c(p, 14);
      for (int64_t t = 0; t < p.tokens; ++t)
        for (int64_t h = 0; h < p.hidden; ++h) {
          for (int64_t j = 0; j < p.top_k; ++j) c.rows.set({t * p.top_k + j, h}, rows[size_t(j)]);
          c.addend.set({t, h}, addend);
        }
      std::iota(c.routed.row_of.begin(), c.routed.row_of.end(), 0);
      c.routed.offsets = {0, int32_t(p.rows)};
      c.launch(name);
      for (int64_t t = 0; t < p.tokens; ++t)
        for (int64_t h = 0; h < p.hidden; ++h) EXPECT_EQ(c.tokens.at(t, h), want) << name;
    }
}

// 1e8 - 1e8 + 1 is 1 in that order alone. bf16 has no numbers between 256 and 258, and 257 is
// rounded to 256.
TEST(Permute, AddsTheAddendBehindTheRowsAndRoundsOnce) {
  check_sum(DType::kF32, {1e8, -1e8}, 1, 1);
  check_sum(DType::kBf16, {256, 1}, 1, 258);
}

TEST(Permute, MayAddToWhatItWrites) {
  PermuteProblem p = kSmall;
  p.addend = true;
  for (const PermutePass pass : {PermutePass::kCombine, PermutePass::kPermuteBackward})
    for (const char* name : {"cpu", "cpu_reference"}) {
      p.pass = pass;
      Case want(p, 15), got(p, 15);
      want.launch(name);
      for (int64_t t = 0; t < p.tokens; ++t)
        for (int64_t h = 0; h < p.hidden; ++h) got.tokens.set({t, h}, got.addend.at(t, h));
      PermuteArgs args = got.args();
      args.addend = args.tokens;
      run(plan(p, this_cpu(), name), args, {}, {});
      EXPECT_EQ(got.outputs(), want.outputs()) << to_string(p);
    }
}

TEST(Permute, CombineBackwardMayLeaveOutTheGradientOfProb) {
  PermuteProblem p = kSmall;
  p.pass = PermutePass::kCombineBackward;
  for (const char* name : {"cpu", "cpu_reference"}) {
    Case all(p, 5), some(p, 5);
    all.launch(name);
    PermuteArgs args = some.args();
    args.y = {};
    args.dprob = nullptr;
    args.map.row_of = nullptr;
    run(plan(p, this_cpu(), name), args, {}, {});
    EXPECT_EQ(some.rows.bytes(), all.rows.bytes());
    EXPECT_TRUE(some.dprob.untouched(0, p.tokens));
  }
}

TEST(PermuteProblem, PrintsAndParsesBack) {
  PermuteProblem p{.tokens = 4096, .top_k = 2, .rows = 8192, .hidden = 2048, .experts = 64};
  EXPECT_EQ(to_string(p), "permute permute T=4096 top_k=2 R=8192 H=2048 E=64 dtype=bf16");
  EXPECT_EQ(parse_permute_problem(to_string(p)), p);
  p.pass = PermutePass::kCombineBackward;
  p.dtype = DType::kF32;
  p.prob = true;
  p.tail = Tail::kZero;
  EXPECT_EQ(to_string(p),
            "permute combine_backward T=4096 top_k=2 R=8192 H=2048 E=64 dtype=f32 prob=yes "
            "tail=zero");
  EXPECT_EQ(parse_permute_problem(to_string(p)), p);
  p = {.pass = PermutePass::kCombine, .tokens = 4, .rows = 4, .hidden = 3, .addend = true};
  EXPECT_EQ(to_string(p), "permute combine T=4 top_k=1 R=4 H=3 E=1 dtype=bf16 addend=yes");
  EXPECT_EQ(parse_permute_problem(to_string(p)), p);
}

std::string plan_error(std::string_view words) {
  const std::string message =
      test::invalid([&] { plan(parse_permute_problem(words), this_cpu()); });
  return message.substr(0, message.rfind(" ["));
}

TEST(PermuteErrors, OfProblems) {
  EXPECT_EQ(plan_error("permute combine T=4 H=0"), "permute: H is 0, must be 1 or more");
  for (const char* pass : {"permute", "combine_backward"})
    EXPECT_EQ(plan_error(text("permute ", pass, " T=4 H=1 E=0")),
              "permute: E is 0, must be 1 or more");
  EXPECT_EQ(plan_error("permute combine T=4 H=1 top_k=0"),
            "permute: top_k is 0, must be 1 or more");
  EXPECT_EQ(plan_error("permute combine T=2147483648 H=1"),
            "permute: T is 2147483648, must be below 2^31; rows are numbered in int32");
  EXPECT_EQ(plan_error("permute combine T=1073741824 top_k=2 H=1"),
            "permute: T * top_k is 2147483648, must be below 2^31; rows are numbered in int32");
  EXPECT_EQ(plan_error("permute combine R=2147483648 H=1"),
            "permute: R is 2147483648, must be below 2^31; rows are numbered in int32");
  EXPECT_EQ(plan_error("permute combine H=1 ranks=0"), "permute: ranks is 0, must be 1 or more");
  EXPECT_EQ(plan_error("permute combine H=1 ranks=32768"),
            "permute: ranks is 32768, must be below 2^15");
  EXPECT_EQ(plan_error("permute permute T=1073741824 H=1 ranks=2"),
            "permute: ranks * T * top_k is 2147483648, must be below 2^31; rows are numbered in "
            "int32");
  EXPECT_EQ(plan_error("permute combine R=1073741824 H=1 ranks=2"),
            "permute: ranks * R is 2147483648, must be below 2^31; rows are numbered in int32");
  EXPECT_EQ(plan_error("permute combine_backward H=1 ranks=2 prob=yes"),
            "permute: prob is yes, must be no; combine backward of several ranks has no "
            "probabilities");
  for (const char* pass : {"permute", "combine_backward"})
    EXPECT_EQ(plan_error(text("permute ", pass, " H=1 addend=yes")),
              "permute: addend is yes, must be no; only combine and permute_backward write sums");
  EXPECT_EQ(plan_error("permute combine H=1 dtype=u8"),
            "permute: dtype is u8, must be f32, bf16 or f16");
  EXPECT_EQ(plan_error("permute gather H=1"),
            "problem: pass is 'gather', must be one of permute, permute_backward, combine, "
            "combine_backward");
  EXPECT_EQ(test::invalid([] { plan(PermuteProblem{.tokens = -1, .hidden = 1}, this_cpu()); }),
            "permute: T is -1, must be 0 or more [permute permute T=-1 top_k=1 R=0 H=1 E=1 "
            "dtype=bf16]");
  EXPECT_EQ(test::invalid([] { plan(PermuteProblem{.rows = -1, .hidden = 1}, this_cpu()); }),
            "permute: R is -1, must be 0 or more [permute permute T=0 top_k=1 R=-1 H=1 E=1 "
            "dtype=bf16]");
}

/// The error of running `p` after `spoil` changed one argument.
template <class Spoil>
std::string error(PermutePass pass, bool prob, Spoil&& spoil) {
  PermuteProblem p = kSmall;
  p.pass = pass;
  p.prob = prob;
  Case c(p, 1);
  PermuteArgs args = c.args();
  spoil(args, c);
  const std::string message = test::invalid([&] { run(plan(p, this_cpu()), args, {}, {}); });
  return message.substr(0, message.rfind(" ["));
}

TEST(PermuteErrors, OfViews) {
  EXPECT_EQ(
      error(PermutePass::kCombine, true, [](PermuteArgs& a, Case& c) { a.tokens = c.rows.view(); }),
      "permute: tokens is f32[8, 3] strides (4, 1), must be f32[4, 3]");
  EXPECT_EQ(
      error(PermutePass::kCombine, true, [](PermuteArgs& a, Case& c) { a.rows = c.tokens.view(); }),
      "permute: rows is f32[4, 3] strides (6, 1), must be f32[8, 3]");
  EXPECT_EQ(error(PermutePass::kCombineBackward, true,
                  [](PermuteArgs& a, Case& c) { a.y = c.tokens.view(); }),
            "permute: y is f32[4, 3] strides (6, 1), must be f32[8, 3]; dprob is made from it");
  EXPECT_EQ(
      error(PermutePass::kCombineBackward, true, [](PermuteArgs& a, Case&) { a.dprob = nullptr; }),
      "permute: y is given, must be null; dprob is null, and nothing else is made from it");
  EXPECT_EQ(error(PermutePass::kCombine, true, [](PermuteArgs& a, Case& c) { a.y = c.y.view(); }),
            "permute: y is given, must be null; only combine backward with prob=yes reads it");
}

TEST(PermuteErrors, OfAddends) {
  const auto give = [](PermuteArgs& a, Case& c) { a.addend = c.addend.view(); };
  EXPECT_EQ(error(PermutePass::kCombine, true, give),
            "permute: addend is given, must be null; the problem says addend=no");
  PermuteProblem p = kSmall;
  p.pass = PermutePass::kCombine;
  p.addend = true;
  Case c(p, 1);
  PermuteArgs args = c.args();
  args.addend = c.rows.view();
  const std::string message = test::invalid([&] { run(plan(p, this_cpu()), args, {}, {}); });
  EXPECT_EQ(message.substr(0, message.rfind(" [")),
            "permute: addend is f32[8, 3] strides (4, 1), must be f32[4, 3]; the problem says "
            "addend=yes");
}

TEST(PermuteErrors, OfMapsAndOffsets) {
  const auto no_map = [](PermuteArgs& a, Case&) { a.map = {}; };
  EXPECT_EQ(error(PermutePass::kPermute, false, no_map),
            "permute: map.slot_of is null, must point to 8 elements; offsets of routing make it");
  EXPECT_EQ(error(PermutePass::kCombine, false, no_map),
            "permute: map.row_of is null, must point to 8 elements; offsets of routing make it");
  EXPECT_EQ(
      error(PermutePass::kCombine, false, [](PermuteArgs& a, Case&) { a.offsets.experts = 9; }),
      "permute: offsets.experts is 9, must be 3; the experts of the problem");
  PermuteProblem p = kSmall;
  p.pass = PermutePass::kCombine;
  Case c(p, 1);
  p.experts = 0;
  const std::string message = test::invalid([&] { run(plan(p, this_cpu()), c.args(), {}, {}); });
  EXPECT_EQ(message.substr(0, message.rfind(" [")),
            "permute: offsets.data is given, must be null; rows of several ranks, or of E=0, have "
            "no tail");
}

// Sums without offsets are those with offsets that have all rows.
TEST(PermuteWithoutOffsets, SumsAllRows) {
  std::mt19937 random(3);
  for (const PermutePass pass : {PermutePass::kCombine, PermutePass::kPermuteBackward})
    for (const std::string_view only : {"cpu", "cpu_reference"}) {
      PermuteProblem p{.pass = pass, .tokens = 9, .top_k = 3, .rows = 31, .hidden = 20};
      p.prob = true;
      Case want(p, 2), got(p, 2);
      for (Case* c : {&want, &got}) {
        std::mt19937 same(4);
        c->rows.fill(same, -2, 2);
        c->drow_prob.fill(same, -2, 2);
        c->drow_scale.fill(same, -2, 2);
        c->routed.offsets = {0, int32_t(p.rows)};
        for (int32_t& row : c->routed.row_of) row = int32_t(same() % 33) - 1;  // 31 is none
      }
      want.launch(only);
      got.p.experts = 0;
      PermuteArgs args = got.args();
      args.offsets = {};
      run(plan(got.p, this_cpu(), only), args, {}, {});
      EXPECT_EQ(got.outputs(), want.outputs()) << only;
    }
}

TEST(PermuteErrors, OfProbabilities) {
  EXPECT_EQ(error(PermutePass::kPermute, true, [](PermuteArgs& a, Case&) { a.prob = nullptr; }),
            "permute: prob is null, must point to 8 elements; the problem says prob=yes");
  EXPECT_EQ(error(PermutePass::kPermute, true, [](PermuteArgs& a, Case&) { a.row_prob = nullptr; }),
            "permute: row_prob is null, must point to 8 elements; the problem says prob=yes");
  EXPECT_EQ(error(PermutePass::kPermuteBackward, true,
                  [](PermuteArgs& a, Case&) { a.drow_prob = nullptr; }),
            "permute: drow_prob is null, must point to 8 elements; the problem says prob=yes");
  EXPECT_EQ(
      error(PermutePass::kPermuteBackward, true, [](PermuteArgs& a, Case&) { a.dprob = nullptr; }),
      "permute: dprob is null, must point to 8 elements; the problem says prob=yes");
  EXPECT_EQ(error(PermutePass::kPermute, false,
                  [](PermuteArgs& a, Case& c) { a.prob = c.prob.data<float>(); }),
            "permute: prob is given, must be null; the problem says prob=no");
  EXPECT_EQ(error(PermutePass::kCombine, true,
                  [](PermuteArgs& a, Case& c) { a.row_prob = c.row_prob.data<float>(); }),
            "permute: row_prob is given, must be null; this pass has no use for it");
  const auto scale = [](PermuteArgs& a, Case& c) { a.drow_scale = c.drow_prob.data<float>(); };
  EXPECT_EQ(error(PermutePass::kCombine, true, scale),
            "permute: drow_scale is given, must be null; this pass has no use for it");
  EXPECT_EQ(error(PermutePass::kPermuteBackward, false, scale),
            "permute: drow_scale is given, must be null; the problem says prob=no");
}

}  // namespace
