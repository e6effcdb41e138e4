#pragma once
#include <array>
#include <functional>

#include "cadre/grouped_linear.h"
#include "cadre/wgrad_queue.h"
#include "tests/judge/counts.h"
#include "tests/judge/workspace.h"
#include "tests/layers/parameters.h"

namespace cadre::test {

inline Memory memory(const OwnedWorkspace& w) { return {w.get().data, w.get().bytes}; }

/// What a case is made for.
struct MadeFor {
  Device device = this_cpu();
  int64_t step = 1;              ///< gaps between rows are multiples of so many elements
  std::string_view route{};      ///< the plan's, if not the first that takes it
  std::string_view mlp_route{};  ///< that of an expert MLP
};

/// One grouped linear layer with every tensor that it reads and writes, all of it watched: random
/// inputs in the rows of the experts, NaN in the tails and in what is written.
struct LinearCase {
  GroupedLinearPlan plan;
  Counts counts;
  std::vector<int32_t> offsets;
  Parameters parameters;
  MadeFor made_for;
  Tensor x, y, dy, dx, bias_scale, dbias_scale;
  std::array<uint64_t, 2> rng = {0x5eed'0000'1234'5678ull, 7};
  OwnedWorkspace saved, pending, weight_cache;
  bool refresh_weights = true;
  WgradQueue* queue = nullptr;
  int64_t version = 0;
  std::function<void(GroupedLinearArgs&)> change_args{};

  LinearCase(const GroupedLinearProblem& p, const Counts& c, unsigned seed,
             const MadeFor& where = {})
      : plan(cadre::plan(p, where.device, where.route)),
        counts(c),
        offsets(c.offsets()),
        made_for(where),
        saved(plan.memory.saved_bytes),
        pending(plan.memory.pending_bytes),
        weight_cache(plan.memory.weight_cache_bytes) {
    std::mt19937 random(seed);
    parameters = Parameters({.layout = p.parameters,
                             .experts = p.experts,
                             .n = p.n,
                             .k = p.k,
                             .accumulate = p.options.accumulate,
                             .accumulate_bias = p.options.accumulate_bias},
                            random);
    x = Tensor(p.dtype, {p.rows, p.k}, {.row_gap = 3 * where.step});
    dy = Tensor(p.dtype, {p.rows, p.n}, {.row_gap = 1 * where.step});
    bias_scale = Tensor(DType::kF32, {p.rows});
    x.fill(random, -2, 2, 0, counts.used());
    dy.fill(random, -1, 1, 0, counts.used());
    for (int64_t r = 0; r < counts.used(); ++r) bias_scale.set({r}, double(random() % 1000) / 999);
    clear();
  }

  const GroupedLinearProblem& p() const { return plan.problem; }

  /// Fresh outputs.
  void clear() {
    y = Tensor(p().dtype, {p().rows, p().n}, {.row_gap = 5 * made_for.step});
    dx = Tensor(p().dtype, {p().rows, p().k}, {.row_gap = 7 * made_for.step});
    dbias_scale = Tensor(DType::kF32, {p().rows});
  }

  GroupedLinearArgs args() {
    GroupedLinearArgs a{.offsets = {offsets.data(), p().experts}, .parameters = parameters.args()};
    a.parameters.version = version;
    a.x = x.view();
    a.y = y.view();
    a.dy = dy.view();
    a.dx = dx.view();
    a.bias_scale = bias_scale.data<float>();
    a.dbias_scale = dbias_scale.data<float>();
    a.rng = rng.data();
    a.saved = memory(saved);
    a.pending = memory(pending);
    a.weight_cache = memory(weight_cache);
    a.refresh_weights = refresh_weights;
    a.queue = queue;
    if (change_args) change_args(a);
    return a;
  }

  void forward() {
    const OwnedWorkspace w(plan.memory.forward_workspace_bytes);
    cadre::forward(plan, args(), w.get(), {});
  }
  void backward() {
    const OwnedWorkspace w(plan.memory.backward_workspace_bytes);
    cadre::backward(plan, args(), w.get(), {});
  }
  void wgrad() {
    const OwnedWorkspace w(plan.memory.wgrad_workspace_bytes);
    cadre::wgrad(plan, args(), w.get(), {});
  }
  /// Forward, backward and, where it is deferred, wgrad.
  void step() {
    forward();
    if (!learns()) return;
    backward();
    if (p().options.deferred && p().wgrad) wgrad();
  }
  bool learns() const { return cadre::learns(plan); }
  bool defers() const { return p().options.deferred && p().wgrad; }

  template <class Visit>
  void for_pieces(Visit&& visit) const {
    visit(list_piece("offsets", offsets));
    parameters.for_pieces(visit);
    for (const auto& [name, t] : {std::pair("x", &x), {"dy", &dy}, {"bias_scale", &bias_scale}})
      visit(piece(name, *t, Holds::kInput));
    for (const auto& [name, t] : {std::pair("y", &y), {"dx", &dx}, {"dbias_scale", &dbias_scale}})
      visit(piece(name, *t, Holds::kOutput));
    visit(list_piece("rng", rng));
    visit(piece("saved", saved));
    visit(piece("pending", pending));
    visit(piece("weight_cache", weight_cache));
  }

  std::string damage() const {
    return parameters.damage() + x.damage() + y.damage() + dy.damage() + dx.damage() +
           dbias_scale.damage();
  }
};

/// Everything that a step wrote, to compare two cases bit for bit: doubles hold every plain value.
struct LinearResult {
  std::vector<double> y, dx, dw, dbias, dbias_scale;

  explicit LinearResult(const LinearCase& c)
      : y(used(c.y, c)),
        dx(used(c.dx, c)),
        dw(c.parameters.dw.values()),
        dbias(c.parameters.dbias.values()),
        dbias_scale(used(c.dbias_scale, c)) {}

 private:
  static std::vector<double> used(const Tensor& t, const LinearCase& c) {
    std::vector<double> all = t.values();
    const int64_t columns = c.p().rows == 0 ? 0 : int64_t(all.size()) / c.p().rows;
    all.resize(size_t(c.counts.used() * columns));
    return all;
  }
};

/// Empty if both hold the same bits; NaN equals NaN.
inline std::string first_difference(const std::vector<double>& got,
                                    const std::vector<double>& want) {
  if (got.size() != want.size()) return text(got.size(), " elements, want ", want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const bool same = std::isnan(want[i])
                          ? std::isnan(got[i])
                          : got[i] == want[i] && std::signbit(got[i]) == std::signbit(want[i]);
    if (!same) return text("element ", i, ": got ", got[i], ", want ", want[i]);
  }
  return {};
}

inline std::string first_difference(const LinearResult& got, const LinearResult& want) {
  std::string all;
  const auto part = [&](const char* name, const auto& a, const auto& b) {
    const std::string difference = first_difference(a, b);
    if (!difference.empty()) all += text(name, " ", difference, "; ");
  };
  part("y", got.y, want.y);
  part("dx", got.dx, want.dx);
  part("dw", got.dw, want.dw);
  part("dbias", got.dbias, want.dbias);
  part("dbias_scale", got.dbias_scale, want.dbias_scale);
  return all;
}

}  // namespace cadre::test
