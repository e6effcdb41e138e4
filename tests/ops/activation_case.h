#pragma once
#include <gtest/gtest.h>

#include <random>
#include <string_view>
#include <vector>

#include "cadre/activation.h"
#include "tests/judge/tensor.h"

namespace cadre::test {

/// One problem with its tensors: inputs random in the rows of the experts, NaN in the tail.
struct ActivationCase {
  ActivationProblem p;
  int64_t gap;
  std::vector<int32_t> offsets;
  Tensor z, prob, dh, h, dz, dprob;
  bool wants_h = true, wants_dprob = true;
  bool dz_is_z = false, h_is_dh = false;

  ActivationCase(const ActivationProblem& problem, int64_t used, unsigned seed, int64_t row_gap = 3)
      : p(problem), gap(row_gap), offsets(size_t(p.experts) + 1, int32_t(used)) {
    const int64_t columns = info(p.kind).gated ? 2 * p.features : p.features;
    offsets[0] = 0;
    z = Tensor(p.z, {p.rows, columns}, {.row_gap = gap});
    dh = Tensor(p.h, {p.rows, p.features}, {.row_gap = gap});
    prob = Tensor(DType::kF32, {p.rows});
    std::mt19937 random(seed);
    z.fill(random, -6, 6, 0, used);
    dh.fill(random, -2, 2, 0, used);
    for (int64_t r = 0; r < used; ++r) prob.set({r}, double(random() % 1000) / 999);
    clear();
  }
  void clear() {
    h = Tensor(p.h, {p.rows, p.features}, {.row_gap = 2 * gap});
    dz = Tensor(p.z, {p.rows, z.columns()}, {.row_gap = gap});
    dprob = Tensor(DType::kF32, {p.rows});
  }
  int64_t used() const { return offsets.back(); }

  /// `view` and `list` say where tensors and lists are.
  template <class View, class List>
  ActivationArgs args(View&& view, List&& list) {
    const auto floats = [&](const Tensor& t) { return static_cast<float*>(view(t).data); };
    ActivationArgs given{.z = view(z), .offsets = {list(offsets), p.experts}};
    if (p.prob) given.prob = floats(prob);
    if (!p.backward || wants_h) given.h = view(h);
    if (!p.backward) return given;
    given.dh = view(dh);
    given.dz = dz_is_z ? given.z : view(dz);
    if (h_is_dh) given.h = given.dh;
    if (p.prob && wants_dprob) given.dprob = floats(dprob);
    return given;
  }
  void on_cpu(std::string_view only) {
    const ActivationPlan made = plan(p, this_cpu(), only);
    EXPECT_EQ(made.name, only);
    const auto view = [](const Tensor& t) { return t.view(); };
    run(made, args(view, [](auto& all) { return all.data(); }), {}, {});
    EXPECT_EQ(h.damage() + dz.damage() + dprob.damage(), "") << to_string(p);
  }
};

}  // namespace cadre::test
