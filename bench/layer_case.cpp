#include "bench/layer_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "bench/cases/parts.h"
#include "bench/cases/quantized.h"
#include "bench/element.h"

namespace cadre::bench {
namespace {

using Outputs = std::vector<LayerOutput>;

/// Rows, columns and the types of one linear layer's parameters, and which gradients are wanted.
struct Linear {
  int experts;
  int64_t n, k;
  const ParameterLayout& layout;
  const Format& format;  ///< of weights in fprop
  bool bias, wgrad, dbias;
  const LayerOptions& options;
};

LayerOutput output(const char* name, const TensorView& v, int64_t live, bool anew = true) {
  return {{.name = name, .view = v, .live = live, .exact = true}, anew};
}

/// The gradient of a parameter, which holds numbers already: poison where a step writes it anew.
LayerOutput gradient(const char* name, const TensorView& v, bool wanted, Accumulate accumulate) {
  const bool anew = wanted && accumulate == Accumulate::kNo;
  if (anew) std::memset(v.data, 0xff, size_t(bytes_for(v.dtype, elements(v))));
  return output(name, v, v.shape[0], anew);
}

/// Numbers of many sizes, none far above 1, so that scales of blocks differ and small codes vanish.
TensorView random_rows(Buffers& buffers, DType dtype, std::initializer_list<int64_t> shape,
                       int64_t live, uint64_t seed) {
  constexpr uint64_t kExponents = 13;
  const TensorView v = random_tensor(buffers, dtype, shape, live, seed);
#pragma omp parallel for
  for (int64_t i = 0; i < live * v.shape[1]; ++i) {
    const int64_t at = offset_of(v, i);
    const auto exponent = int((uint64_t(i) * 0x9e3779b97f4a7c15 >> 32) % kExponents);
    store(v, at, std::ldexp(load(v, at), -exponent));
  }
  return v;
}

/// A float for every row, `live` of which belong to experts, that backward writes.
float* row_gradient(Buffers& buffers, const char* name, std::pair<int64_t, int64_t> rows_and_live,
                    Outputs& outputs) {
  const auto [rows, live] = rows_and_live;
  auto* data = buffers.array<float>(rows);
  outputs.push_back(output(name, view(data, DType::kF32, {rows}), live));
  return data;
}

/// [E, N, K] in the order that the layout asks for.
TensorView weights(Buffers& buffers, const Linear& l, DType dtype, uint64_t seed) {
  TensorView v = random_tensor(buffers, dtype, {l.experts, l.n, l.k}, l.experts, seed);
  if (l.layout.weight_major == Major::kColumn) v.stride = {l.n * l.k, 1, l.n, 0};
  return v;
}

/// E pointers instead of one tensor, if the layout says so.
void** split(Buffers& buffers, bool discrete, TensorView& v) {
  void** list =
      pointers(buffers, discrete, v.data, bytes_for(v.dtype, v.stride[0]), int(v.shape[0]));
  if (discrete) v.data = nullptr;
  return list;
}

/// Gradients are appended to the outputs.
LinearParameters parameters(Buffers& buffers, const Linear& l, Seeds& seeds, Outputs& outputs) {
  const ParameterLayout& p = l.layout;
  LinearParameters own;
  if (l.options.quantized_w) {
    const QuantizedShape shape{RowsKind::kWeights, l.n, l.k, l.experts, l.format};
    own.quantized_w = random_quantized(buffers, shape, {}, seeds.next()).view;
  } else {
    own.w = weights(buffers, l, p.weight, seeds.next());
    own.discrete_w = split(buffers, p.discrete_weight, own.w);
  }
  own.dw = weights(buffers, l, p.dw, seeds.next());
  outputs.push_back(gradient("dw", own.dw, l.wgrad, l.options.accumulate));
  own.discrete_dw = split(buffers, p.discrete_dw, own.dw);
  own.accumulate = accumulate_words(buffers, l.options.accumulate, l.experts, seeds.next());
  if (!l.bias) return own;
  own.bias = random_tensor(buffers, p.bias, {l.experts, l.n}, l.experts, seeds.next());
  own.discrete_bias = split(buffers, p.discrete_bias, own.bias);
  own.dbias = random_tensor(buffers, p.dbias, {l.experts, l.n}, l.experts, seeds.next());
  outputs.push_back(gradient("dbias", own.dbias, l.dbias, l.options.accumulate_bias));
  own.discrete_dbias = split(buffers, p.discrete_bias, own.dbias);
  own.accumulate_bias =
      accumulate_words(buffers, l.options.accumulate_bias, l.experts, seeds.next());
  return own;
}

/// Those of both linears of a layer of experts.
template <class Problem, class Args>
void add_parameters(Buffers& buffers, const Problem& p, Seeds& seeds, Args& args,
                    Outputs& outputs) {
  const int64_t n1 = z_columns(p.activation, p.features);
  const auto linear = [&](int64_t n, int64_t k, bool bias, bool wgrad) {
    return parameters(
        buffers,
        {p.experts, n, k, p.parameters, p.recipe.fprop.rhs, bias, wgrad, p.dbias, p.options}, seeds,
        outputs);
  };
  args.fc1 = linear(n1, p.hidden, p.bias1, p.wgrad1);
  args.fc2 = linear(p.hidden, p.features, p.bias2, p.wgrad2);
}

/// What the expert has that all tokens visit.
void add_shared_expert(Buffers& buffers, const MoeProblem& p, Seeds& seeds, MoeArgs& args,
                       Outputs& outputs) {
  GroupedMlpProblem one{.hidden = p.hidden, .features = p.shared_features, .experts = 1};
  one.activation = p.activation;
  one.parameters = p.parameters;
  one.recipe = p.recipe;
  one.wgrad1 = p.wgrad1;
  one.wgrad2 = p.wgrad2;
  one.options = p.options;
  GroupedMlpArgs own;
  add_parameters(buffers, one, seeds, own, outputs);
  args.shared_fc1 = own.fc1;
  args.shared_fc2 = own.fc2;
  if (!p.shared_gate) return;
  args.shared_gate = random_floats(buffers, p.tokens, p.tokens, seeds.next());
  if (p.dlogits)
    args.dshared_gate = row_gradient(buffers, "dshared_gate", {p.tokens, p.tokens}, outputs);
}

/// Not `reached`: backward ends before this layer.
LinearParameters parameters(Buffers& buffers, const GroupedLinearProblem& p, Seeds& seeds,
                            Outputs& outputs, bool reached = true) {
  const bool wgrad = p.wgrad && reached, dbias = p.dbias && !p.return_bias && reached;
  return parameters(
      buffers,
      {p.experts, p.n, p.k, p.parameters, p.recipe.fprop.rhs, p.bias, wgrad, dbias, p.options},
      seeds, outputs);
}

/// Whether rows of y, or of dx, go to places.
template <class Problem>
bool scatters_y(const Problem& p) {
  if constexpr (requires { p.scatter; }) return p.scatter;
  return false;
}
template <class Problem>
bool scatters_dx(const Problem& p) {
  if constexpr (requires { p.scatter_dx; }) return p.scatter_dx;
  return scatters_y(p);
}

/// [R, columns], or that of places.
template <class Problem>
TensorView written_rows(Buffers& buffers, const Problem& p, int64_t columns, bool scatters) {
  const int64_t rows = scatters ? p.tokens * p.top_k : p.rows;
  return scatters && p.ranks > 1 ? buffers.tensor(p.dtype, {p.ranks, rows, columns})
                                 : buffers.tensor(p.dtype, {rows, columns});
}

/// Slots or places, where the layer gathers or scatters; tokens for forward, and the rows that they
/// are for backward.
template <class Problem, class Args>
void add_tokens(Buffers& buffers, const Problem& p, const Rows& rows, Seeds& seeds, Args& args) {
  if (scatters_y(p) || scatters_dx(p))
    args.place_of =
        random_places(buffers, rows, {p.rows, p.ranks, p.tokens * p.top_k}, seeds.next());
  if (!p.gather && !p.gather_dy) return;
  const Slots slots{p.rows, p.tokens, p.top_k};
  if (p.gather)
    args.tokens = random_rows(buffers, p.dtype, {p.tokens, args.x[1]}, p.tokens, seeds.next());
  auto* slot_of = random_slots(buffers, rows, slots, seeds.next());
  if (p.gather) copy_rows(args.x, args.tokens, slot_of, slots, rows.live());
  args.slot_of = slot_of;
}

/// In the order in which the layer reads it.
template <class Problem>
TensorView random_dy(Buffers& buffers, const Problem& p, int64_t columns, const Rows& rows,
                     Seeds& seeds) {
  const int64_t all = p.gather_dy ? p.tokens : p.rows, live = p.gather_dy ? all : rows.live();
  return random_rows(buffers, p.dtype, {all, columns}, live, seeds.next());
}

/// Codes that come with x or dy; none where no step of the plan reads them.
QuantizedView random_codes(Buffers& buffers, const GroupedLinearPlan& plan, const char* name,
                           const Rows& rows, Seeds& seeds) {
  const LayerTensor* codes = find_tensor(plan, name);
  if (codes == nullptr || codes->read < 0) return {};
  return random_quantized(buffers, codes->shape, rows, seeds.next()).view;
}

/// Those of x, of the linear that reads it.
template <class Args>
void add_codes_of_x(Buffers& buffers, const GroupedLinearPlan& plan, const Rows& rows, Seeds& seeds,
                    Args& args) {
  const bool all = plan.problem.options.quantized_x;
  if (all || plan.problem.given_x_along_k)
    args.x_along_k = random_codes(buffers, plan, "x along K", rows, seeds);
  if (all) args.x_along_rows = random_codes(buffers, plan, "x along rows", rows, seeds);
}

Memory memory(Buffers& buffers, int64_t bytes) { return {buffers.take(bytes), bytes}; }

template <class Args>
const TensorView& result(const Args& args) {
  return args.y;
}
const TensorView& result(const MoeArgs& args) { return args.out; }

/// What all layers take besides tensors, and what all write, in `live` rows.
template <class Plan, class Args>
LayerCase<Plan, Args> layer_case(const Plan& plan, std::unique_ptr<Buffers> buffers, Args args,
                                 Outputs outputs, int64_t live) {
  const LayerMemory& m = plan.memory;
  auto* rng = buffers->template array<uint64_t>(2);
  std::fill_n(rng, 2, uint64_t(1));
  args.rng = rng;
  args.saved = memory(*buffers, m.saved_bytes);
  args.pending = memory(*buffers, m.pending_bytes);
  args.weight_cache = memory(*buffers, m.weight_cache_bytes);
  const Workspace workspace = buffers->workspace(
      std::max({m.forward_workspace_bytes, m.backward_workspace_bytes, m.wgrad_workspace_bytes}));
  const auto live_of = [live](const TensorView& v, bool scatters) {
    return scatters ? v.shape[0] : live;
  };
  const TensorView& y = result(args);
  outputs.push_back(output("y", y, live_of(y, scatters_y(plan.problem))));
  outputs.push_back(output("dx", args.dx, live_of(args.dx, scatters_dx(plan.problem)),
                           find_tensor(plan, "dx") != nullptr));
  return {plan, args, workspace, std::move(outputs), std::move(buffers)};
}

/// What an operation of a row reads and writes.
struct Tensors {
  int64_t rows, columns_in, columns_out;
  int experts;
  DType in, out;
};
Tensors tensors_of(const RowOp& op) {
  if (const auto* l = std::get_if<GroupedLinearProblem>(&op))
    return {l->rows, l->k, l->n, l->experts, l->dtype, l->dtype};
  const auto& a = std::get<ActivationProblem>(op);
  return {a.rows, z_columns(a.kind, a.features), a.features, a.experts, a.z, a.h};
}

/// Whether something holds of one of a row's linears.
template <class Holds>
bool any_linear(const SequentialProblem& p, Holds&& holds) {
  return std::any_of(p.ops.begin(), p.ops.end(), [&](const RowOp& op) {
    const auto* linear = std::get_if<GroupedLinearProblem>(&op);
    return linear && holds(*linear);
  });
}

}  // namespace

LinearCase make_layer_case(const GroupedLinearProblem& p, const Device& device, const Draw& draw) {
  auto buffers = std::make_unique<Buffers>();
  Buffers& b = *buffers;
  Seeds seeds(draw);
  const Rows rows = draw_rows(b, draw, p.rows, p.experts);
  GroupedLinearArgs args{.offsets = rows.offsets};
  Outputs outputs;
  args.parameters = parameters(b, p, seeds, outputs);
  args.x = random_rows(b, p.dtype, {p.rows, p.k}, rows.live(), seeds.next());
  add_tokens(b, p, rows, seeds, args);
  args.y = written_rows(b, p, activated_columns(p.n, p.activation), p.scatter);
  if (p.activation && p.activation->keep_z) args.z = b.tensor(p.dtype, {p.rows, p.n});
  if (p.activation && p.activation->prob)
    args.prob = random_floats(b, p.rows, rows.live(), seeds.next());
  args.dy = random_dy(b, p, p.n, rows, seeds);
  args.dx = written_rows(b, p, p.k, p.scatter_dx);
  if (p.bias_scale) {
    args.bias_scale = random_floats(b, p.rows, rows.live(), seeds.next());
    args.dbias_scale = row_gradient(b, "dbias_scale", {p.rows, rows.live()}, outputs);
    outputs.back().anew = p.dbias;
  }
  const GroupedLinearPlan chosen = plan(p, device);
  add_codes_of_x(b, chosen, rows, seeds, args);
  if (p.given_dy_along_k) args.dy_along_k = random_codes(b, chosen, "dy along K", rows, seeds);
  return layer_case<GroupedLinearPlan>(chosen, std::move(buffers), args, std::move(outputs),
                                       rows.live());
}

MlpCase make_layer_case(const GroupedMlpProblem& p, const Device& device, const Draw& draw) {
  auto buffers = std::make_unique<Buffers>();
  Buffers& b = *buffers;
  Seeds seeds(draw);
  const Rows rows = draw_rows(b, draw, p.rows, p.experts);
  GroupedMlpArgs args{.offsets = rows.offsets};
  Outputs outputs;
  add_parameters(b, p, seeds, args, outputs);
  args.x = random_rows(b, p.dtype, {p.rows, p.hidden}, rows.live(), seeds.next());
  add_tokens(b, p, rows, seeds, args);
  args.y = written_rows(b, p, p.hidden, p.scatter);
  args.dy = random_dy(b, p, p.hidden, rows, seeds);
  args.dx = written_rows(b, p, p.hidden, p.scatter);
  if (p.prob) args.prob = random_floats(b, p.rows, rows.live(), seeds.next());
  if (p.prob && p.dprob) args.dprob = row_gradient(b, "dprob", {p.rows, rows.live()}, outputs);
  if (p.bias2_scale) {
    args.bias2_scale = random_floats(b, p.rows, rows.live(), seeds.next());
    args.dbias2_scale = row_gradient(b, "dbias2_scale", {p.rows, rows.live()}, outputs);
    outputs.back().anew = p.dbias;
  }
  const GroupedMlpPlan chosen = plan(p, device);
  add_codes_of_x(b, chosen.fc1, rows, seeds, args);
  return layer_case<GroupedMlpPlan>(chosen, std::move(buffers), args, std::move(outputs),
                                    rows.live());
}

/// The experts that a router has chosen for tokens, their probabilities, and the gradient of these.
void add_choice(Buffers& b, const MoeProblem& p, const Draw& draw, MoeArgs& args,
                Outputs& outputs) {
  const std::vector<int64_t> drawn = draw_choices(draw, p.tokens, p.top_k, p.experts);
  const auto written = [&](auto* data) {
    std::copy(drawn.begin(), drawn.end(), data);
    return data;
  };
  const auto count = int64_t(drawn.size());
  args.choice = p.index == DType::kI64 ? static_cast<const void*>(written(b.array<int64_t>(count)))
                                       : written(b.array<int32_t>(count));
  if (p.dlogits) args.dchoice_prob = row_gradient(b, "dchoice_prob", {count, count}, outputs);
}

MoeCase make_layer_case(const MoeProblem& p, const Device& device, const Draw& draw) {
  auto buffers = std::make_unique<Buffers>();
  Buffers& b = *buffers;
  Seeds seeds(draw);
  MoeArgs args;
  Outputs outputs;
  add_parameters(b, p, seeds, args, outputs);
  if (p.shared_features > 0) add_shared_expert(b, p, seeds, args, outputs);
  if (p.routed) {
    add_choice(b, p, draw, args, outputs);
    args.choice_prob = random_floats(b, p.tokens * p.top_k, p.tokens * p.top_k, seeds.next());
  } else {
    args.logits = b.tensor(p.logits, {p.tokens, p.experts});
    fill_logits(args.logits, draw);
    args.experts = b.array<int32_t>(p.tokens * p.top_k);
  }
  if (p.expert_bias) args.expert_bias = random_floats(b, p.experts, p.experts, seeds.next());
  args.x = random_rows(b, p.dtype, {p.tokens, p.hidden}, p.tokens, seeds.next());
  args.out = b.tensor(p.dtype, {p.tokens, p.hidden});
  args.offsets = b.array<int32_t>(int64_t(p.experts) + 1);
  args.dout = random_rows(b, p.dtype, {p.tokens, p.hidden}, p.tokens, seeds.next());
  args.dx = b.tensor(p.dtype, {p.tokens, p.hidden});
  if (p.dlogits && !p.routed) {
    args.dlogits = b.tensor(p.logits, {p.tokens, p.experts});
    outputs.push_back(output("dlogits", args.dlogits, p.tokens));
  }
  return layer_case<MoePlan>(plan(p, device), std::move(buffers), args, std::move(outputs),
                             p.tokens);
}

SequentialCase make_layer_case(const SequentialProblem& p, const Device& device, const Draw& draw) {
  auto buffers = std::make_unique<Buffers>();
  Buffers& b = *buffers;
  Seeds seeds(draw);
  const SequentialPlan chosen = plan(p, device);
  const Tensors first = tensors_of(p.ops.front()), last = tensors_of(p.ops.back());
  const Rows rows = draw_rows(b, draw, first.rows, first.experts);
  SequentialArgs args{.offsets = rows.offsets};
  SequentialLists lists;
  Outputs outputs;
  const RowPart& stop = chosen.row[size_t(chosen.backward_stop)];
  for (size_t i = 0; i < p.ops.size(); ++i)
    if (const auto* linear = std::get_if<GroupedLinearProblem>(&p.ops[i]))
      lists.parameters.push_back(
          parameters(b, *linear, seeds, outputs, i >= size_t(stop.first_op)));
  for (int i = 0; i < chosen.extra_inputs; ++i) {
    lists.extra_inputs.push_back(random_floats(b, first.rows, rows.live(), seeds.next(), 0.5f));
    lists.extra_gradients.push_back(
        i < stop.first_extra
            ? nullptr
            : row_gradient(b, "extra gradient", {first.rows, rows.live()}, outputs));
  }
  args.x = random_rows(b, first.in, {first.rows, first.columns_in}, rows.live(), seeds.next());
  args.y = b.tensor(last.out, {last.rows, last.columns_out});
  args.dy = random_rows(b, last.out, {last.rows, last.columns_out}, rows.live(), seeds.next());
  args.dx = b.tensor(first.in, {first.rows, first.columns_in});
  SequentialCase c{
      layer_case<SequentialPlan>(chosen, std::move(buffers), args, std::move(outputs), rows.live()),
      std::move(lists)};
  c.args.parameters = c.lists.parameters;
  c.args.extra_inputs = c.lists.extra_inputs;
  c.args.extra_gradients = c.lists.extra_gradients;
  return c;
}

bool defers(const GroupedLinearProblem& p) { return p.options.deferred && p.wgrad; }
bool defers(const GroupedMlpProblem& p) { return p.options.deferred && (p.wgrad1 || p.wgrad2); }
bool defers(const MoeProblem& p) { return p.options.deferred && (p.wgrad1 || p.wgrad2); }
bool defers(const SequentialProblem& p) {
  return any_linear(p, [](const GroupedLinearProblem& linear) { return defers(linear); });
}

bool caches_weights(const GroupedLinearProblem& p) { return p.options.cache_weights; }
bool caches_weights(const GroupedMlpProblem& p) { return p.options.cache_weights; }
bool caches_weights(const MoeProblem& p) { return p.options.cache_weights; }
bool caches_weights(const SequentialProblem& p) {
  return any_linear(p, [](const GroupedLinearProblem& linear) { return caches_weights(linear); });
}

SequentialArgs moved(const Mirror& mirror, SequentialCase& c) {
  for (LinearParameters& own : c.lists.parameters) own = mirror.moved(own);
  for (const float*& extra : c.lists.extra_inputs)
    extra = static_cast<const float*>(mirror.place_of(extra));
  for (float*& gradient : c.lists.extra_gradients)
    gradient = static_cast<float*>(mirror.place_of(gradient));
  return mirror.moved(c.args);
}

}  // namespace cadre::bench
