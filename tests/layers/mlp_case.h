#pragma once
#include "cadre/grouped_mlp.h"
#include "tests/layers/linear_case.h"
#include "tests/layers/sum.h"

namespace cadre::test {

/// One expert MLP with every tensor that it reads and writes, all of it watched.
struct MlpCase {
  GroupedMlpPlan plan;
  Counts counts;
  std::vector<int32_t> offsets;
  Parameters fc1, fc2;
  MadeFor made_for;
  Tensor x, y, dy, dx, prob, bias2_scale, dprob, dbias2_scale, z, dh;
  bool shows_inside = false;  ///< z and dh are the caller's
  std::array<uint64_t, 2> rng = {0x5eed'0000'1234'5678ull, 7};
  OwnedWorkspace saved, pending, weight_cache;
  bool refresh_weights = true;
  WgradQueue* queue = nullptr;
  std::function<void(GroupedMlpArgs&)> change_args{};

  MlpCase(const GroupedMlpProblem& p, const Counts& c, unsigned seed, const MadeFor& where = {})
      : plan(cadre::plan(p, where.device, where.mlp_route)),
        counts(c),
        offsets(c.offsets()),
        made_for(where),
        saved(plan.memory.saved_bytes),
        pending(plan.memory.pending_bytes),
        weight_cache(plan.memory.weight_cache_bytes) {
    std::mt19937 random(seed);
    fc1 = Parameters(sizes(plan.fc1.problem), random);
    fc2 = Parameters(sizes(plan.fc2.problem), random);
    const int64_t used = counts.used();
    x = Tensor(p.dtype, {p.rows, p.hidden}, {.row_gap = 3 * where.step});
    dy = Tensor(p.dtype, {p.rows, p.hidden}, {.row_gap = 1 * where.step});
    prob = Tensor(DType::kF32, {p.rows});
    bias2_scale = Tensor(DType::kF32, {p.rows});
    x.fill(random, -2, 2, 0, used);
    dy.fill(random, -1, 1, 0, used);
    for (int64_t r = 0; r < used; ++r) {
      prob.set({r}, double(1 + random() % 1000) / 1000);
      bias2_scale.set({r}, double(random() % 1000) / 999);
    }
    clear();
  }

  const GroupedMlpProblem& p() const { return plan.problem; }

  /// Fresh outputs.
  void clear() {
    y = Tensor(p().dtype, {p().rows, p().hidden}, {.row_gap = 5 * made_for.step});
    dx = Tensor(p().dtype, {p().rows, p().hidden}, {.row_gap = 7 * made_for.step});
    z = Tensor(p().dtype, {p().rows, plan.fc1.problem.n}, {.row_gap = 2 * made_for.step});
    dh = Tensor(p().dtype, {p().rows, p().features}, {.row_gap = 2 * made_for.step});
    dprob = Tensor(DType::kF32, {p().rows});
    dbias2_scale = Tensor(DType::kF32, {p().rows});
  }

  GroupedMlpArgs args() {
    GroupedMlpArgs a{.offsets = {offsets.data(), p().experts}};
    a.fc1 = fc1.args();
    a.fc2 = fc2.args();
    a.x = x.view();
    if (p().prob) a.prob = prob.data<float>();
    a.bias2_scale = bias2_scale.data<float>();
    a.y = y.view();
    a.dy = dy.view();
    a.dx = dx.view();
    if (p().prob && p().dprob) a.dprob = dprob.data<float>();
    a.dbias2_scale = dbias2_scale.data<float>();
    if (shows_inside) a.z = z.view();
    if (shows_inside) a.dh = dh.view();
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
  bool learns() const { return cadre::learns(plan); }
  bool defers() const { return p().options.deferred && (p().wgrad1 || p().wgrad2); }

  template <class Visit>
  void for_pieces(Visit&& visit) const {
    visit(list_piece("offsets", offsets));
    fc1.for_pieces(visit);
    fc2.for_pieces(visit);
    for (const auto& [name, t] :
         {std::pair("x", &x), {"dy", &dy}, {"prob", &prob}, {"bias2_scale", &bias2_scale}})
      visit(piece(name, *t, Holds::kInput));
    for (const auto& [name, t] : {std::pair("y", &y),
                                  {"dx", &dx},
                                  {"dprob", &dprob},
                                  {"dbias2_scale", &dbias2_scale},
                                  {"z", &z},
                                  {"dh", &dh}})
      visit(piece(name, *t, Holds::kOutput));
    visit(list_piece("rng", rng));
    visit(piece("saved", saved));
    visit(piece("pending", pending));
    visit(piece("weight_cache", weight_cache));
  }
  /// Forward, backward and, where it is deferred, wgrad.
  void step() {
    forward();
    if (!learns()) return;
    backward();
    if (p().options.deferred && (p().wgrad1 || p().wgrad2)) wgrad();
  }

  std::string damage() const {
    return fc1.damage() + fc2.damage() + x.damage() + y.damage() + dy.damage() + dx.damage() +
           prob.damage() + dprob.damage() + dbias2_scale.damage() + z.damage() + dh.damage();
  }

 private:
  static ParameterCase sizes(const GroupedLinearProblem& p) {
    return {.layout = p.parameters,
            .experts = p.experts,
            .n = p.n,
            .k = p.k,
            .accumulate = p.options.accumulate,
            .accumulate_bias = p.options.accumulate_bias};
  }
};

/// The elements of the rows that the experts have.
inline Values used_rows(const Tensor& t, const Counts& counts) {
  Values all = t.values();
  const int64_t columns = counts.rows == 0 ? 0 : int64_t(all.size()) / counts.rows;
  all.resize(size_t(counts.used() * columns));
  return all;
}

/// Everything that a step wrote, by name.
struct MlpResult {
  std::vector<std::pair<const char*, Values>> parts;

  explicit MlpResult(const MlpCase& c)
      : parts{{"y", used_rows(c.y, c.counts)},
              {"dx", used_rows(c.dx, c.counts)},
              {"dprob", used_rows(c.dprob, c.counts)},
              {"dbias2_scale", used_rows(c.dbias2_scale, c.counts)},
              {"dw1", c.fc1.dw.values()},
              {"dw2", c.fc2.dw.values()},
              {"dbias1", c.fc1.dbias.values()},
              {"dbias2", c.fc2.dbias.values()}} {}
};

inline std::string first_difference(const MlpResult& got, const MlpResult& want) {
  std::string all;
  for (size_t i = 0; i < got.parts.size(); ++i) {
    const std::string difference = first_difference(got.parts[i].second, want.parts[i].second);
    if (!difference.empty()) all += text(got.parts[i].first, " ", difference, "; ");
  }
  return all;
}

}  // namespace cadre::test
