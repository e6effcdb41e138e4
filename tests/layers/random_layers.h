#pragma once
#include <array>
#include <random>
#include <span>

#include "cadre/grouped_mlp.h"
#include "tests/judge/counts.h"

// Random problems of layers.
namespace cadre::test {

inline constexpr DType kPlainTypes[] = {DType::kF32, DType::kBf16, DType::kF16};

/// A grouped linear problem with every option drawn from `seed`, N and K out of `widths`.
inline GroupedLinearProblem random_linear(const Counts& counts, unsigned seed,
                                          std::span<const int64_t> widths) {
  std::mt19937 random(seed);
  const auto draw = [&](size_t end) { return size_t(random() % end); };
  GroupedLinearProblem p{.rows = counts.rows};
  p.n = widths[draw(widths.size())];
  p.k = widths[draw(widths.size())];
  p.experts = counts.experts();
  p.dtype = kPlainTypes[draw(3)];
  p.parameters = {
      .weight = kPlainTypes[draw(3)], .bias = kPlainTypes[draw(3)], .dw = kPlainTypes[draw(3)]};
  p.parameters.dbias = kPlainTypes[draw(3)];
  p.parameters.discrete_weight = draw(2);
  p.parameters.discrete_bias = draw(2);
  p.parameters.discrete_dw = draw(2);
  p.bias = draw(2);
  p.bias_scale = p.bias && draw(2);
  p.return_bias = p.bias && !p.bias_scale && draw(4) == 0;
  p.dgrad = draw(4);
  p.wgrad = draw(4);
  p.dbias = draw(4);
  p.options.accumulate = Accumulate(draw(4));
  p.options.accumulate_bias = Accumulate(draw(4));
  p.options.deferred = draw(2);
  p.options.save_input = draw(2);
  p.options.cache_weights = draw(2);
  p.options.tail = Tail(draw(2));
  return p;
}

/// An expert MLP in the `seed`-th activation, layout and plain recipe, with biases, probabilities
/// and what becomes of h drawn likewise.
inline GroupedMlpProblem plain_mlp(const Counts& counts, unsigned seed) {
  constexpr GluLayout kLayouts[] = {GluLayout::kConcat, GluLayout::kInterleave1,
                                    GluLayout::kInterleave32};
  const ActivationInfo& row = activation_list()[seed % activation_list().size()];
  GroupedMlpProblem p{.rows = counts.rows, .hidden = 10, .features = 32};
  p.experts = counts.experts();
  p.recipe = recipe_list()[seed % 3].recipe;
  p.dtype = p.recipe.fprop.lhs.element;
  p.parameters = {.weight = p.dtype, .dw = DType::kF32, .dbias = DType::kF32};
  p.activation = row.kind;
  if (row.kind == ActivationKind::kClampedSwiGlu) p.constants = {2.0f, 1.25f, 0.5f};
  if (row.gated) p.layout = kLayouts[seed % 3];
  if (p.layout != GluLayout::kInterleave32) p.features = 7;
  p.prob = seed % 4 != 0;
  p.bias1 = seed % 3 != 0;
  p.bias2 = seed % 5 != 0;
  p.bias2_scale = p.bias2 && seed % 2;
  p.options.deferred = seed % 2;
  p.keep_h = seed / 2 % 2;
  p.options.tail = Tail(seed / 3 % 2);
  return p;
}

}  // namespace cadre::test
