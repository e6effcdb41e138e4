#pragma once
#include <gtest/gtest.h>

#include <random>
#include <string_view>
#include <vector>

#include "cadre/bias_grad.h"
#include "tests/judge/counts.h"
#include "tests/judge/tensor.h"

namespace cadre::test {

/// One problem with its tensors: inputs random in the rows of the experts, NaN in the tail; dbias
/// holds numbers where they are added to, else NaN.
struct BiasGradCase {
  BiasGradProblem p;
  std::vector<int32_t> offsets, words;
  Tensor dy, bias, bias_scale, dbias, dbias_scale;
  std::vector<void*> bias_pointers, dbias_pointers;  ///< of the rows that args() names

  BiasGradCase(const BiasGradProblem& problem, const Counts& counts, unsigned seed, int64_t gap = 3)
      : p(problem),
        offsets(counts.offsets()),
        dy(p.dy, {p.rows, p.n}, {.row_gap = gap}),
        bias(p.bias, {p.experts, p.n}, {.row_gap = gap}),
        bias_scale(DType::kF32, {p.rows}),
        dbias(p.dbias, {p.experts, p.n}, {.row_gap = 5}),
        dbias_scale(DType::kF32, {p.rows}) {
    std::mt19937 random(seed);
    dy.fill(random, -2, 2, 0, used());
    bias.fill(random, -1, 1);
    for (int64_t r = 0; r < used(); ++r) bias_scale.set({r}, double(random() % 1000) / 999);
    for (int e = 0; e < p.experts; ++e) {
      words.push_back(int32_t((seed / 2 + unsigned(e)) % 2));
      if (adds(e)) dbias.fill(random, -3, 3, row_of_expert(e), row_of_expert(e) + 1);
    }
  }
  bool adds(int e) const {
    if (p.accumulate == Accumulate::kDevice) return words[0] != 0;
    if (p.accumulate == Accumulate::kPerExpert) return words[size_t(e)] != 0;
    return p.accumulate == Accumulate::kYes;
  }
  int64_t used() const { return offsets.back(); }
  /// Discrete pointers stand in reverse, so that taking the tensor for them would be seen.
  int64_t row_of_expert(int e) const { return p.discrete ? p.experts - 1 - e : e; }

  /// `view` and `list` say where tensors and lists are.
  template <class View, class List>
  BiasGradArgs args(View&& view, List&& list) {
    const auto floats = [&](const Tensor& t) { return static_cast<float*>(view(t).data); };
    const auto rows = [&](const TensorView& v) {
      std::vector<void*> all;
      for (int e = p.experts - 1; e >= 0; --e) all.push_back(cpu::row_address(v, e));
      return all;
    };
    const TensorView to = view(dbias), from = view(bias);
    dbias_pointers = rows(to), bias_pointers = rows(from);
    BiasGradArgs given{.dy = view(dy), .offsets = {list(offsets), p.experts}};
    if (p.discrete) given.discrete_dbias = list(dbias_pointers);
    if (!p.discrete) given.dbias = to;
    if (p.accumulate == Accumulate::kDevice || p.accumulate == Accumulate::kPerExpert)
      given.accumulate = list(words);
    if (!p.bias_scale) return given;
    if (p.discrete) given.discrete_bias = list(bias_pointers);
    if (!p.discrete) given.bias = from;
    given.bias_scale = floats(bias_scale);
    given.dbias_scale = floats(dbias_scale);
    return given;
  }
  BiasGradArgs args() {
    return args([](const Tensor& t) { return t.view(); }, [](auto& all) { return all.data(); });
  }
  void on_cpu(std::string_view only) {
    const BiasGradPlan made = plan(p, this_cpu(), only);
    EXPECT_EQ(made.name, only);
    run(made, args(), {}, {});
    EXPECT_EQ(dbias.damage() + dbias_scale.damage(), "") << to_string(p);
  }
};

}  // namespace cadre::test
