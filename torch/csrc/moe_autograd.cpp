// The gradient of torch.ops.cadre.moe, and its rule for torch.autocast.
#include "autograd.h"
#include "moe.h"

namespace cadre::door {
namespace {

using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Forward = Outputs(const Tensor&, const Tensor&, int64_t, const Maybe&, TensorList, TensorList,
                        TensorList, TensorList, const Maybe&, const Maybe&, const Maybe&,
                        const Maybe&, MoeWants, Text, Text, Text, bool, bool);
using List = std::vector<Tensor>;
using Gradients =
    std::tuple<Tensor, Tensor, List, List, List, List, Tensor, Tensor, Tensor, Tensor>;
using Backward = Gradients(const Tensor&, const Maybe&, const Tensor&, const Tensor&, const Tensor&,
                           const Tensor&, const Tensor&, TensorList, TensorList, TensorList,
                           TensorList, const Maybe&, const Maybe&, const Maybe&, const Maybe&,
                           MoeWants, bool, Text, Text, Text, bool, bool,
                           std::optional<at::ScalarType>);
using RoutingBackward = Tensor(const Tensor&, const Tensor&, const Maybe&, const Maybe&, int64_t,
                               c10::string_view, bool, double, int64_t, int64_t);

/// What is no tensor, from forward to backward.
struct Options {
  int64_t top_k;
  MoeWants wants;
  Text routing, activation, recipe;
  bool keep_h, keep_rows;
  const WeightCopies* copies = nullptr;  ///< multiplied in place of the weights, if there are any
};

/// The tensors of a forward.
struct Inputs {
  const Tensor &x, &logits;
  const Maybe& expert_bias;
  TensorList weight1, bias1, weight2, bias2;
  const Maybe &shared1, &shared2, &shared_gate, &rng;
};

Outputs forward_op(const Inputs& in, const Options& o) {
  static const auto call = op<Forward>("cadre::moe");
  return call.call(in.x, in.logits, o.top_k, in.expert_bias, in.weight1, in.bias1, in.weight2,
                   in.bias2, in.shared1, in.shared2, in.shared_gate, in.rng, o.wants, o.routing,
                   o.activation, o.recipe, o.keep_h, o.keep_rows);
}

/// The gradient of the logits through prob and scores alone.
Tensor routing_backward(const Tensor& logits, const Tensor& experts, const Maybe& dprob,
                        const Maybe& dscores, Text words) {
  static const auto call = op<RoutingBackward>("cadre::routing_backward");
  const RoutingProblem& r = routing_of(words);
  return call.call(logits, experts, dprob, dscores, experts.sym_size(1).expect_int(),
                   words.substr(0, words.find(' ')), r.normalize, r.scale, r.groups, r.group_top_k);
}

class MoeFunction : public torch::autograd::Function<MoeFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& logits,
                               const Maybe& expert_bias, TensorList weight1, TensorList bias1,
                               TensorList weight2, TensorList bias2, const Maybe& shared1,
                               const Maybe& shared2, const Maybe& shared_gate, const Maybe& rng,
                               const Options& o) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const TensorList read1 = o.copies ? TensorList(o.copies->weight1) : weight1;
    const TensorList read2 = o.copies ? TensorList(o.copies->weight2) : weight2;
    const Maybe &own1 = o.copies ? o.copies->shared1 : shared1,
                &own2 = o.copies ? o.copies->shared2 : shared2;
    const auto [out, experts, prob, scores, offsets, saved] = forward_op(
        {x, logits, expert_bias, read1, bias1, read2, bias2, own1, own2, shared_gate, rng}, o);
    ctx->set_materialize_grads(false);
    const bool reads_x =
        o.wants[kDw1] &&
        (o.keep_rows ? shared1 && wgrad_reads_x(x, o.recipe)
                     : backward_reads_tokens(x, o.recipe, o.top_k, shared1.has_value()));
    ctx->save_for_backward(joined(if_wanted(reads_x, x), logits, experts, offsets, alias_of(saved),
                                  rng, own1, own2, shared_gate, read1, bias1, read2, bias2));
    ctx->saved_data["dweight"] = type_number(weight1, o.copies);
    ctx->saved_data["wants"] = bits_of(o.wants);
    ctx->saved_data["routing"] = std::string(o.routing);
    ctx->saved_data["kept_in"] = kept_in(saved);
    ctx->saved_data["activation"] = std::string(o.activation);
    ctx->saved_data["recipe"] = std::string(o.recipe);
    ctx->saved_data["keep_h"] = o.keep_h;
    ctx->saved_data["keep_rows"] = o.keep_rows;
    ctx->saved_data["counts"] =
        c10::List<int64_t>({int64_t(weight1.size()), int64_t(bias1.size()), int64_t(weight2.size()),
                            int64_t(bias2.size())});
    return {out, experts, prob, scores, offsets, saved};
  }

  /// Where a loss is made of prob and scores alone, no expert is run.
  static variable_list backward(AutogradContext* ctx, const variable_list& d) {
    refuse_batches(d);
    auto& data = ctx->saved_data;
    const Tensor &dout = d[0], &dprob = d[2], &dscores = d[3];
    SavedTensors in(ctx->get_saved_variables());
    const Tensor x = in.next(), logits = in.next(), experts = in.next(), offsets = in.next(),
                 saved = in.next();
    const Maybe rng = in.next_optional(), shared1 = in.next_optional(),
                shared2 = in.next_optional(), shared_gate = in.next_optional();
    const c10::List<int64_t> counts = data["counts"].toIntList();
    const List weight1 = in.next_list(counts[0]), bias1 = in.next_list(counts[1]);
    const List weight2 = in.next_list(counts[2]), bias2 = in.next_list(counts[3]);
    MoeWants wants;
    read_bits(data["wants"].toInt(), wants);
    Gradients all;
    auto& [dx, dlogits, dw1, dbias1, dw2, dbias2, pending, dshared1, dshared2, dshared_gate] = all;
    if (dout.defined()) {
      static const auto keep = op<Backward>("cadre::moe_backward");
      static const auto overwrite = op<Backward>("cadre::moe_backward", "overwrite_saved");
      const auto& call = may_overwrite(saved, data["kept_in"].toInt()) ? overwrite : keep;
      all = call.call(dout, maybe(dscores), x_or_its_shape(x, dout, weight1[0]), logits, experts,
                      offsets, saved, weight1, bias1, weight2, bias2, shared1, shared2, shared_gate,
                      rng, wants, false, data["routing"].toStringRef(),
                      data["activation"].toStringRef(), data["recipe"].toStringRef(),
                      data["keep_h"].toBool(), data["keep_rows"].toBool(),
                      type_of(data["dweight"].toInt()));
    }
    const Maybe alone = dout.defined() ? std::nullopt : maybe(dscores);
    if (wants[kDlogits] && (dprob.defined() || alone)) {
      const Tensor more =
          routing_backward(logits, experts, maybe(dprob), alone, data["routing"].toStringRef());
      dlogits = dout.defined() ? dlogits + more : more;
    }
    return without_second_derivatives(
        "cadre.MoE", d,
        joined(if_wanted(wants[kDx], dx), if_wanted(wants[kDlogits], dlogits), Tensor(),
               or_none(dw1, counts[0]), or_none(dbias1, counts[1]), or_none(dw2, counts[2]),
               or_none(dbias2, counts[3]), if_wanted(shared1 && wants[kDw1], dshared1),
               if_wanted(shared2 && wants[kDw2], dshared2),
               if_wanted(shared_gate && wants[kDlogits], dshared_gate), Tensor(), Tensor()));
  }
};

/// As of grouped_linear: `wants` adds to the gradients that the tensors themselves require. The
/// probabilities weigh bias2, so their gradient is made with that of bias2.
Outputs differentiate(const Inputs& in, Options options) {
  const auto& [x, logits, expert_bias, weight1, bias1, weight2, bias2, shared1, shared2,
               shared_gate, rng] = in;
  const MoeWants required{requires_grad(x), requires_grad(logits) || requires_grad(shared_gate),
                          requires_grad(weight1) || requires_grad(shared1),
                          requires_grad(weight2) || requires_grad(shared2),
                          requires_grad(bias1) || requires_grad(bias2)};
  const bool grad = at::GradMode::is_enabled() && required != MoeWants{};
  const Maybe state = given_or_drawn(rng, options.recipe, x);
  if (!grad) {
    refuse_tangents({{"x", x},
                     {"logits", logits},
                     {"weight1", weight1},
                     {"bias1", bias1},
                     {"weight2", weight2},
                     {"bias2", bias2},
                     {"shared_weight1", list_of(shared1)},
                     {"shared_weight2", list_of(shared2)},
                     {"shared_gate", list_of(shared_gate)}});
    const at::AutoDispatchBelowADInplaceOrView below;
    return forward_op({x, logits, expert_bias, weight1, bias1, weight2, bias2, shared1, shared2,
                       shared_gate, state},
                      options);
  }
  MoeWants& wants = options.wants;
  for (size_t i = 0; i < wants.size(); ++i) wants[i] = wants[i] || required[i];
  wants[kDbias] = wants[kDbias] || (wants[kDlogits] && !bias2.empty());
  const variable_list out =
      MoeFunction::apply(x, logits, expert_bias, weight1, bias1, weight2, bias2, shared1, shared2,
                         shared_gate, state, options);
  return {out[0], out[1], out[2], out[3], out[4], out[5]};
}

Outputs differentiable(const Tensor& x, const Tensor& logits, int64_t top_k,
                       const Maybe& expert_bias, TensorList weight1, TensorList bias1,
                       TensorList weight2, TensorList bias2, const Maybe& shared1,
                       const Maybe& shared2, const Maybe& shared_gate, const Maybe& rng,
                       MoeWants wants, Text routing, Text activation, Text recipe, bool keep_h,
                       bool keep_rows) {
  return differentiate(
      {x, logits, expert_bias, weight1, bias1, weight2, bias2, shared1, shared2, shared_gate, rng},
      {top_k, wants, routing, activation, recipe, keep_h, keep_rows});
}

/// x and the parameters in autocast's type; logits stay as they are.
template <c10::DispatchKey kKey, c10::DeviceType kDevice>
Outputs autocast(const Tensor& x, const Tensor& logits, int64_t top_k, const Maybe& expert_bias,
                 TensorList weight1, TensorList bias1, TensorList weight2, TensorList bias2,
                 const Maybe& shared1, const Maybe& shared2, const Maybe& shared_gate,
                 const Maybe& rng, MoeWants wants, Text routing, Text activation, Text recipe,
                 bool keep_h, bool keep_rows) {
  const c10::impl::ExcludeDispatchKeyGuard outside(kKey);
  const at::ScalarType type = at::autocast::get_autocast_dtype(kDevice);
  const auto cast = [&](TensorList list) { return cast_for_autocast(type, list, kDevice); };
  const Tensor tokens = at::autocast::cached_cast(type, x, kDevice);
  const List w1 = cast(weight1), b1 = cast(bias1), w2 = cast(weight2), b2 = cast(bias2);
  const auto cast_one = [&](const Maybe& t) {
    return t ? Maybe(at::autocast::cached_cast(type, *t, kDevice)) : std::nullopt;
  };
  const Maybe own1 = cast_one(shared1), own2 = cast_one(shared2);
  Options options{top_k, wants, routing, activation, recipe, keep_h, keep_rows};
  if (!differentiates_weights(type, weight1, weight2))
    return forward_op({tokens, logits, expert_bias, w1, b1, w2, b2, own1, own2, shared_gate, rng},
                      options);
  const auto alone = [](const Maybe& t) { return t ? Maybe(t->detach()) : t; };
  const WeightCopies copies{detached(w1), detached(w2), alone(own1), alone(own2)};
  options.copies = &copies;
  return differentiate(
      {tokens, logits, expert_bias, weight1, b1, weight2, b2, shared1, shared2, shared_gate, rng},
      options);
}

}  // namespace

TORCH_LIBRARY_IMPL(cadre, Autograd, m) {
  m.impl("moe", differentiable);
  m.impl("moe_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("moe_backward.overwrite_saved", torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(cadre, AutocastCUDA, m) {
  m.impl("moe", autocast<c10::DispatchKey::AutocastCUDA, c10::DeviceType::CUDA>);
}
TORCH_LIBRARY_IMPL(cadre, AutocastCPU, m) {
  m.impl("moe", autocast<c10::DispatchKey::AutocastCPU, c10::DeviceType::CPU>);
}

}  // namespace cadre::door
