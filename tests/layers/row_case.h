#pragma once
#include "cadre/sequential.h"
#include "tests/layers/mlp_case.h"

namespace cadre::test {

/// A row with every tensor that it reads and writes.
struct RowCase {
  SequentialPlan plan;
  Counts counts;
  std::vector<int32_t> offsets;
  std::vector<Parameters> own;
  std::vector<Tensor> extra, extra_gradient;
  std::vector<LinearParameters> parameters;
  std::vector<const float*> extra_inputs;
  std::vector<float*> extra_gradients;
  std::vector<OpArgument> op_arguments;
  Tensor x, y, dy, dx;
  std::array<uint64_t, 2> rng = {99, 3};
  OwnedWorkspace saved, pending, weight_cache;
  bool gives_y = true, gives_dx = true;
  WgradQueue* queue = nullptr;

  RowCase(const SequentialProblem& p, const Counts& c, unsigned seed, const MadeFor& where = {})
      : plan(cadre::plan(p, where.device)),
        counts(c),
        offsets(c.offsets()),
        saved(plan.memory.saved_bytes),
        pending(plan.memory.pending_bytes),
        weight_cache(plan.memory.weight_cache_bytes) {
    std::mt19937 random(seed);
    for (const RowOp& op : p.ops)
      if (const auto* l = std::get_if<GroupedLinearProblem>(&op))
        own.emplace_back(ParameterCase{.layout = l->parameters,
                                       .experts = l->experts,
                                       .n = l->n,
                                       .k = l->k,
                                       .accumulate = l->options.accumulate,
                                       .accumulate_bias = l->options.accumulate_bias},
                         random);
    for (auto& parameter : own) parameters.push_back(parameter.args());
    const int64_t rows = c.rows;
    for (int i = 0; i < plan.extra_inputs; ++i) {
      extra.emplace_back(DType::kF32, std::initializer_list<int64_t>{rows});
      extra_gradient.emplace_back(DType::kF32, std::initializer_list<int64_t>{rows});
      for (int64_t r = 0; r < c.used(); ++r) extra[size_t(i)].set({r}, double(random() % 99) / 99);
    }
    for (size_t i = 0; i < extra.size(); ++i) {
      extra_inputs.push_back(extra[i].data<float>());
      extra_gradients.push_back(extra_gradient[i].data<float>());
    }
    const auto& first = p.ops.front();
    const auto& last = p.ops.back();
    x = Tensor(DType::kBf16, {rows, input_columns(first)}, {.row_gap = 2 * where.step});
    dx = Tensor(DType::kBf16, {rows, input_columns(first)}, {.row_gap = 1 * where.step});
    y = Tensor(DType::kBf16, {rows, output_columns(last)}, {.row_gap = 3 * where.step});
    dy = Tensor(DType::kBf16, {rows, output_columns(last)}, {.row_gap = 5 * where.step});
    x.fill(random, -2, 2, 0, c.used());
    dy.fill(random, -1, 1, 0, c.used());
  }
  static int64_t input_columns(const RowOp& op) {
    if (const auto* l = std::get_if<GroupedLinearProblem>(&op)) return l->k;
    const auto& a = std::get<ActivationProblem>(op);
    return info(a.kind).gated ? 2 * a.features : a.features;
  }
  static int64_t output_columns(const RowOp& op) {
    if (const auto* l = std::get_if<GroupedLinearProblem>(&op)) return l->n;
    return std::get<ActivationProblem>(op).features;
  }

  SequentialArgs args() {
    const RowOp& first = plan.problem.ops.front();
    const int experts = std::visit([](const auto& p) { return p.experts; }, first);
    SequentialArgs a{.offsets = {offsets.data(), experts}};
    a.parameters = parameters;
    a.extra_inputs = extra_inputs;
    a.extra_gradients = extra_gradients;
    a.op_arguments = op_arguments;
    a.x = x.view();
    if (gives_y) a.y = y.view();
    a.dy = dy.view();
    if (gives_dx) a.dx = dx.view();
    a.rng = rng.data();
    a.saved = memory(saved);
    a.pending = memory(pending);
    a.weight_cache = memory(weight_cache);
    a.queue = queue;
    return a;
  }
  void run_forward() {
    const OwnedWorkspace w(plan.memory.forward_workspace_bytes);
    forward(plan, args(), w.get(), {});
  }
  void run_backward() {
    const OwnedWorkspace w(plan.memory.backward_workspace_bytes);
    backward(plan, args(), w.get(), {});
  }
  void run_wgrad() {
    const OwnedWorkspace w(plan.memory.wgrad_workspace_bytes);
    wgrad(plan, args(), w.get(), {});
  }
  void step(bool deferred = false) {
    run_forward();
    run_backward();
    if (deferred) run_wgrad();
  }

  bool learns() const { return true; }
  bool defers() const {
    for (const RowOp& op : plan.problem.ops)
      if (const auto* l = std::get_if<GroupedLinearProblem>(&op);
          l != nullptr && l->options.deferred)
        return true;
    return false;
  }

  template <class Visit>
  void for_pieces(Visit&& visit) const {
    visit(list_piece("offsets", offsets));
    for (const Parameters& parameter : own) parameter.for_pieces(visit);
    for (const Tensor& t : extra) visit(piece("extra input", t, Holds::kInput));
    for (const Tensor& t : extra_gradient) visit(piece("extra gradient", t, Holds::kOutput));
    for (const auto& [name, t] : {std::pair("x", &x), {"dy", &dy}})
      visit(piece(name, *t, Holds::kInput));
    for (const auto& [name, t] : {std::pair("y", &y), {"dx", &dx}})
      visit(piece(name, *t, Holds::kOutput));
    visit(list_piece("rng", rng));
    visit(piece("saved", saved));
    visit(piece("pending", pending));
    visit(piece("weight_cache", weight_cache));
  }

  std::vector<Values> result() const {
    std::vector<Values> all = {used_rows(y, counts), used_rows(dx, counts)};
    for (const Tensor& t : extra_gradient) all.push_back(used_rows(t, counts));
    for (const auto& parameter : own) {
      all.push_back(parameter.dw.values());
      all.push_back(parameter.dbias.values());
    }
    return all;
  }
  std::string damage() const {
    std::string all = x.damage() + y.damage() + dy.damage() + dx.damage();
    for (const auto& parameter : own) all += parameter.damage();
    for (const Tensor& t : extra_gradient) all += t.damage();
    return all;
  }
};

inline std::string difference(const RowCase& got, const RowCase& want) {
  const std::vector<Values> a = got.result(), b = want.result();
  std::string all;
  for (size_t i = 0; i < b.size(); ++i) {
    const std::string part = first_difference(a[i], b[i]);
    if (!part.empty()) all += text("result ", i, " ", part, "; ");
  }
  return all;
}

inline const Counts kRowCounts{.rows = 45, .of = {17, 0, 20}};

inline GroupedLinearProblem linear(int64_t n, int64_t k, std::string_view recipe) {
  GroupedLinearProblem p{.rows = 45, .n = n, .k = k, .experts = 3};
  p.recipe = parse_recipe(recipe);
  return p;
}
inline ActivationProblem swiglu(int64_t features) {
  ActivationProblem p{.kind = ActivationKind::kSwiGlu, .rows = 45, .features = features};
  p.experts = 3;
  p.prob = true;
  return p;
}
/// linear, activation, linear: an expert MLP.
inline SequentialProblem mlp_row(std::string_view recipe) {
  SequentialProblem p{.ops = {linear(64, 10, recipe), swiglu(32), linear(10, 32, recipe)}};
  auto& one = std::get<GroupedLinearProblem>(p.ops[0]);
  auto& two = std::get<GroupedLinearProblem>(p.ops[2]);
  one.bias = two.bias = two.bias_scale = true;
  return p;
}
/// The same with a linear before and an activation behind.
inline SequentialProblem long_row(std::string_view recipe) {
  SequentialProblem p = mlp_row(recipe);
  p.ops.insert(p.ops.begin(), linear(10, 7, recipe));
  ActivationProblem last{.kind = ActivationKind::kReluSquared, .rows = 45, .features = 10};
  last.experts = 3;
  p.ops.push_back(last);
  return p;
}
template <class Change>
SequentialProblem each_linear(SequentialProblem p, Change&& change) {
  for (RowOp& op : p.ops)
    if (auto* l = std::get_if<GroupedLinearProblem>(&op)) change(*l);
  return p;
}
inline SequentialProblem unfused(SequentialProblem p) {
  p.fuse = false;
  return p;
}

}  // namespace cadre::test
