#pragma once
#include <cmath>
#include <initializer_list>
#include <random>

#include "cadre/operations.h"
#include "ops/problem_text.h"

// Random problems of every operation.
namespace cadre::test {

/// Draws the fields of random problems.
class Dice {
 public:
  /// Huge: small numbers, and now and then one that is negative or near 2^31 or 2^63.
  explicit Dice(uint64_t seed, bool huge = false) : bits_(seed), huge_(huge) {}

  int64_t below(int64_t bound) {
    return std::uniform_int_distribution<int64_t>(0, bound - 1)(bits_);
  }
  int64_t size() {
    if (huge_) return below(4) == 0 ? huge() : below(40);
    return below(5) == 0 ? below(int64_t(1) << 40) : below(10000);
  }
  int experts() {
    if (huge_) return below(5) == 0 ? int(huge()) : 1 + int(below(6));
    return 1 + int(below(1024));
  }
  int few(int64_t end) { return huge_ && below(9) == 0 ? int(huge()) : int(below(end)); }
  bool coin() { return below(2) == 1; }
  float number() {
    return below(3) == 0 ? std::ldexp(float(below(1 << 24)) - (1 << 23), int(below(200)) - 150)
                         : float(below(100)) / 8;
  }
  template <class T>
  T one_of(std::initializer_list<T> list) {
    return list.begin()[below(int64_t(list.size()))];
  }
  template <class Enum>
  Enum word() {
    return Enum(below(int64_t(ops::Words<Enum>::kList.size())));
  }
  int align() { return huge_ && below(9) == 0 ? int(huge()) : 1 << below(6); }
  DType plain() { return one_of({DType::kF32, DType::kBf16, DType::kF16}); }
  Format format() {
    const FormatInfo& row = format_list()[below(int64_t(format_list().size()))];
    Format f = cadre::format(row.kind);
    if (row.takes_e5m2 && coin()) f.element = DType::kE5m2;
    f.square = row.takes_square && coin();
    if (row.takes_power_of_two) f.power_of_two = coin();
    f.floor_scale = row.takes_floor && coin();
    f.hadamard = row.takes_hadamard && coin();
    f.stochastic = row.takes_stochastic && coin();
    return f;
  }

 private:
  int64_t huge() {
    constexpr int64_t kOne = 1;
    return one_of({int64_t{-1}, INT64_MIN, (kOne << 24) - 1, kOne << 24, (kOne << 31) - 1,
                   kOne << 31, kOne << 32, kOne << 43, kOne << 44, kOne << 61, kOne << 62,
                   INT64_MAX});
  }

  std::mt19937_64 bits_;
  bool huge_;
};

inline void draw(Dice& dice, OffsetsProblem& p) {
  p.source = dice.word<OffsetsSource>();
  p.rows = dice.size();
  p.experts = dice.experts();
  if (p.source == OffsetsSource::kRouting) {
    p.tokens = dice.size();
    p.top_k = dice.few(9);
  }
  p.index = dice.one_of({DType::kI32, DType::kI64});
}

inline void draw(Dice& dice, RoutingProblem& p) {
  p = {.backward = dice.coin(),
       .score = dice.word<RoutingScore>(),
       .tokens = dice.size(),
       .experts = dice.experts(),
       .top_k = dice.few(9),
       .logits = dice.plain(),
       .normalize = dice.coin(),
       .scale = dice.number(),
       .expert_bias = dice.coin(),
       .groups = dice.few(9),
       .group_top_k = dice.few(9),
       .map = dice.coin(),
       .row_prob = dice.coin()};
}

inline void draw(Dice& dice, PermuteProblem& p) {
  p = {.pass = dice.word<PermutePass>(),
       .tokens = dice.size(),
       .top_k = dice.few(9),
       .rows = dice.size(),
       .hidden = dice.size(),
       .experts = dice.experts(),
       .dtype = dice.plain(),
       .ranks = dice.few(4),
       .prob = dice.coin(),
       .addend = dice.coin(),
       .tail = dice.word<Tail>()};
  if (dice.coin()) p.format = dice.format(), p.scales_major = dice.word<Major>();
}

inline void draw(Dice& dice, QuantizeProblem& p) {
  p.kind = dice.word<RowsKind>();
  p.rows = dice.size();
  p.cols = dice.size();
  p.experts = dice.experts();
  p.source = dice.plain();
  const int64_t copies = 1 + dice.below(3);
  if (copies & 1) p.along_k = dice.format();
  if (copies & 2) p.along_rows = dice.format();
  p.role = dice.word<TensorRole>();
  p.amax_eps = dice.coin() ? 0 : std::abs(dice.number());
  p.discrete = p.kind == RowsKind::kWeights && dice.coin();
  p.gather = p.kind == RowsKind::kRagged && dice.below(3) == 0;
  if (p.gather) p.tokens = dice.size(), p.top_k = dice.few(9);
  p.along_k_scales_major = dice.word<Major>();
  p.along_rows_codes_major = dice.word<Major>();
  p.along_rows_scales_major = dice.word<Major>();
  p.along_k_decoded = dice.coin();
  p.along_rows_decoded = dice.coin();
}

inline void draw(Dice& dice, DequantizeProblem& p) {
  p.source = {.kind = dice.word<RowsKind>(),
              .rows = dice.size(),
              .cols = dice.size(),
              .experts = dice.experts(),
              .format = dice.format(),
              .axis = dice.word<Axis>(),
              .codes_major = dice.word<Major>(),
              .scales_major = dice.word<Major>()};
  p.out = dice.plain();
  p.decoded = dice.coin();
}

inline void draw(Dice& dice, GroupedGemmProblem& p) {
  p.pass = dice.word<Pass>();
  p.rows = dice.size();
  p.n = dice.size();
  p.k = dice.size();
  p.experts = dice.experts();
  p.lhs = dice.format();
  p.rhs = dice.coin() ? p.lhs : dice.format();
  p.out = dice.plain();
  p.lhs_major = dice.word<Major>();
  p.rhs_major = dice.word<Major>();
  p.out_major = dice.word<Major>();
  for (bool GroupedGemmProblem::*flag :
       {&GroupedGemmProblem::discrete_rhs, &GroupedGemmProblem::discrete_out,
        &GroupedGemmProblem::alpha, &GroupedGemmProblem::beta, &GroupedGemmProblem::bias,
        &GroupedGemmProblem::discrete_bias, &GroupedGemmProblem::bias_scale})
    p.*flag = dice.coin();
  p.bias_dtype = dice.plain();
  p.accumulate = dice.word<Accumulate>();
  p.tail = dice.word<Tail>();
  p.unit_budget = dice.few(4);
  p.align = dice.align();
  p.lhs_scales_major = dice.word<Major>();
  p.rhs_scales_major = dice.word<Major>();
  p.dense = p.experts == 1 && p.pass == Pass::kFprop && p.tail == Tail::kZero;
  if (dice.below(3) != 0) return;
  p.gather = dice.word<Gather>();
  p.tokens = dice.size();
  p.top_k = dice.few(9);
}

inline void draw(Dice& dice, ActivationProblem& p) {
  p.backward = dice.coin();
  p.kind = ActivationKind(dice.below(int64_t(activation_list().size())));
  if (p.kind == ActivationKind::kClampedSwiGlu)
    p.constants = {.limit = dice.number(), .alpha = dice.number(), .offset = dice.number()};
  if (info(p.kind).gated) p.layout = dice.word<GluLayout>();
  p.rows = dice.size();
  p.features = dice.size();
  p.experts = dice.experts();
  p.z = dice.plain();
  p.h = dice.plain();
  p.prob = dice.coin();
  p.tail = dice.word<Tail>();
  if (dice.coin()) p.along_k = dice.format();
  p.along_k_scales_major = dice.word<Major>();
  p.amax_eps = dice.coin() ? dice.number() : 0;
  p.plain = dice.coin();
}

inline void draw(Dice& dice, BiasGradProblem& p) {
  p = {.rows = dice.size(),
       .n = dice.size(),
       .experts = dice.experts(),
       .dy = dice.plain(),
       .dbias = dice.plain(),
       .discrete = dice.coin(),
       .bias_scale = dice.coin(),
       .bias = dice.plain(),
       .accumulate = dice.word<Accumulate>(),
       .tail = dice.word<Tail>()};
}

}  // namespace cadre::test
