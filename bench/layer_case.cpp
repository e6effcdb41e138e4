#include "bench/layer_case.h"

#include <algorithm>

#include "bench/cases/parts.h"

namespace cadre::bench {
namespace {

/// Rows, columns and the types of one linear layer's parameters.
struct Linear {
  int experts;
  int64_t n, k;
  const ParameterLayout& layout;
  bool bias;
  Accumulate accumulate, accumulate_bias;
};

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

LinearParameters parameters(Buffers& buffers, const Linear& l, Seeds& seeds) {
  const ParameterLayout& p = l.layout;
  LinearParameters own;
  own.w = weights(buffers, l, p.weight, seeds.next());
  own.discrete_w = split(buffers, p.discrete_weight, own.w);
  own.dw = weights(buffers, l, p.dw, seeds.next());
  own.discrete_dw = split(buffers, p.discrete_dw, own.dw);
  own.accumulate = accumulate_words(buffers, l.accumulate, l.experts, seeds.next());
  if (!l.bias) return own;
  own.bias = random_tensor(buffers, p.bias, {l.experts, l.n}, l.experts, seeds.next());
  own.discrete_bias = split(buffers, p.discrete_bias, own.bias);
  own.dbias = random_tensor(buffers, p.dbias, {l.experts, l.n}, l.experts, seeds.next());
  own.discrete_dbias = split(buffers, p.discrete_bias, own.dbias);
  own.accumulate_bias = accumulate_words(buffers, l.accumulate_bias, l.experts, seeds.next());
  return own;
}

Memory memory(Buffers& buffers, int64_t bytes) { return {buffers.take(bytes), bytes}; }

/// What both layers take besides tensors.
template <class Plan, class Args>
LayerCase<Plan, Args> layer_case(const Plan& plan, std::unique_ptr<Buffers> buffers, Args args) {
  const LayerMemory& m = plan.memory;
  auto* rng = buffers->template array<uint64_t>(2);
  std::fill_n(rng, 2, uint64_t(1));
  args.rng = rng;
  args.saved = memory(*buffers, m.saved_bytes);
  args.pending = memory(*buffers, m.pending_bytes);
  args.weight_cache = memory(*buffers, m.weight_cache_bytes);
  const Workspace workspace = buffers->workspace(
      std::max({m.forward_workspace_bytes, m.backward_workspace_bytes, m.wgrad_workspace_bytes}));
  return {plan, args, workspace, std::move(buffers)};
}

}  // namespace

LinearCase make_layer_case(const GroupedLinearProblem& p, const Device& device, const Draw& draw) {
  auto buffers = std::make_unique<Buffers>();
  Buffers& b = *buffers;
  Seeds seeds(draw);
  const Rows rows = draw_rows(b, draw, p.rows, p.experts);
  GroupedLinearArgs args{.offsets = rows.offsets};
  args.parameters = parameters(
      b, {p.experts, p.n, p.k, p.parameters, p.bias, p.accumulate, p.accumulate_bias}, seeds);
  args.x = random_tensor(b, p.dtype, {p.rows, p.k}, rows.live(), seeds.next());
  args.y = b.tensor(p.dtype, {p.rows, p.n});
  args.dy = random_tensor(b, p.dtype, {p.rows, p.n}, rows.live(), seeds.next());
  args.dx = b.tensor(p.dtype, {p.rows, p.k});
  if (p.bias_scale) {
    args.bias_scale = random_floats(b, p.rows, rows.live(), seeds.next());
    args.dbias_scale = b.array<float>(p.rows);
  }
  return layer_case<GroupedLinearPlan>(plan(p, device), std::move(buffers), args);
}

MlpCase make_layer_case(const GroupedMlpProblem& p, const Device& device, const Draw& draw) {
  auto buffers = std::make_unique<Buffers>();
  Buffers& b = *buffers;
  Seeds seeds(draw);
  const Rows rows = draw_rows(b, draw, p.rows, p.experts);
  const int64_t n1 = info(p.activation).gated ? 2 * p.features : p.features;
  GroupedMlpArgs args{.offsets = rows.offsets};
  args.fc1 = parameters(
      b, {p.experts, n1, p.hidden, p.parameters, p.bias1, p.accumulate, p.accumulate_bias}, seeds);
  args.fc2 = parameters(
      b, {p.experts, p.hidden, p.features, p.parameters, p.bias2, p.accumulate, p.accumulate_bias},
      seeds);
  args.x = random_tensor(b, p.dtype, {p.rows, p.hidden}, rows.live(), seeds.next());
  args.y = b.tensor(p.dtype, {p.rows, p.hidden});
  args.dy = random_tensor(b, p.dtype, {p.rows, p.hidden}, rows.live(), seeds.next());
  args.dx = b.tensor(p.dtype, {p.rows, p.hidden});
  if (p.prob) args.prob = random_floats(b, p.rows, rows.live(), seeds.next());
  if (p.prob && p.dprob) args.dprob = b.array<float>(p.rows);
  if (p.bias2_scale) {
    args.bias2_scale = random_floats(b, p.rows, rows.live(), seeds.next());
    args.dbias2_scale = b.array<float>(p.rows);
  }
  return layer_case<GroupedMlpPlan>(plan(p, device), std::move(buffers), args);
}

}  // namespace cadre::bench
