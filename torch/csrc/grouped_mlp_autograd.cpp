// The gradient of torch.ops.cadre.grouped_mlp, and its rule for torch.autocast.
#include "autograd.h"
#include "grouped_mlp.h"

namespace cadre::door {
namespace {

using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Maybe&, TensorList,
                                           TensorList, TensorList, TensorList, const Maybe&,
                                           const Maybe&, MlpWants, Text, Text, bool, int64_t, Text,
                                           const Maybe&, const Maybe&, const Maybe&);
using List = std::vector<Tensor>;
using Gradients = std::tuple<Tensor, Tensor, List, List, List, List, Tensor, Tensor>;
using Backward = Gradients(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Maybe&,
                           TensorList, TensorList, TensorList, TensorList, const Maybe&,
                           const Maybe&, MlpWants, bool, Text, Text, bool, int64_t, Text,
                           const Maybe&, bool, std::optional<at::ScalarType>);

std::tuple<Tensor, Tensor> forward_op(const MlpCall& c) {
  static const auto call = op<Forward>("cadre::grouped_mlp");
  return call.call(c.x, c.offsets, c.prob, c.weight1, c.bias1, c.weight2, c.bias2, c.bias2_scale,
                   c.rng, c.wants, c.activation, c.recipe, c.keep_h, c.unit_budget, c.window,
                   c.place_of, c.x_codes, c.x_scales);
}

/// What is no tensor, from forward to backward.
struct Options {
  MlpWants wants;
  Text activation, recipe;
  bool keep_h;
  int64_t unit_budget;
  Text window;
  const Maybe &place_of, &x_codes, &x_scales;
  const WeightCopies* copies;  ///< multiplied in place of the weights, if there are any

  /// x is read by wgrad alone where it comes in codes.
  bool x_in_codes() const { return x_codes || x_scales; }
};

class MlpFunction : public torch::autograd::Function<MlpFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& offsets,
                               const Maybe& prob, TensorList weight1, TensorList bias1,
                               TensorList weight2, TensorList bias2, const Maybe& bias2_scale,
                               const Maybe& rng, const Options& o) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const TensorList read1 = o.copies ? TensorList(o.copies->weight1) : weight1;
    const TensorList read2 = o.copies ? TensorList(o.copies->weight2) : weight2;
    auto [y, saved] = forward_op({x, offsets, prob, read1, bias1, read2, bias2, bias2_scale, rng,
                                  o.wants, o.activation, o.recipe, o.keep_h, o.unit_budget,
                                  o.window, o.place_of, o.x_in_codes(), o.x_codes, o.x_scales});
    ctx->set_materialize_grads(false);
    const bool reads_x = o.wants[kDw1] && wgrad_reads_x(x, o.recipe);
    ctx->save_for_backward(joined(if_wanted(reads_x, x), offsets, alias_of(saved), prob,
                                  bias2_scale, rng, o.place_of, read1, bias1, read2, bias2));
    ctx->saved_data["dweight"] = type_number(weight1, o.copies);
    ctx->saved_data["wants"] = bits_of(o.wants);
    ctx->saved_data["kept_in"] = kept_in(saved);
    ctx->saved_data["activation"] = std::string(o.activation);
    ctx->saved_data["recipe"] = std::string(o.recipe);
    ctx->saved_data["keep_h"] = o.keep_h;
    ctx->saved_data["unit_budget"] = o.unit_budget;
    ctx->saved_data["window"] = std::string(o.window);
    ctx->saved_data["x_in_codes"] = o.x_in_codes();
    ctx->saved_data["counts"] =
        c10::List<int64_t>({int64_t(weight1.size()), int64_t(bias1.size()), int64_t(weight2.size()),
                            int64_t(bias2.size())});
    return {y, saved};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& dout) {
    refuse_batches(dout);
    auto& data = ctx->saved_data;
    const c10::List<int64_t> counts = data["counts"].toIntList();
    if (!dout[0].defined())
      return variable_list(size_t(counts[0] + counts[1] + counts[2] + counts[3]) + 6);
    SavedTensors in(ctx->get_saved_variables());
    const Tensor kept = in.next(), offsets = in.next(), saved = in.next();
    const Maybe prob = in.next_optional(), bias2_scale = in.next_optional(),
                rng = in.next_optional(), place_of = in.next_optional();
    const List weight1 = in.next_list(counts[0]), bias1 = in.next_list(counts[1]);
    const List weight2 = in.next_list(counts[2]), bias2 = in.next_list(counts[3]);
    MlpWants wants;
    read_bits(data["wants"].toInt(), wants);
    const Tensor x = x_or_its_shape(kept, dout[0], weight1[0]);
    static const auto keep = op<Backward>("cadre::grouped_mlp_backward");
    static const auto overwrite = op<Backward>("cadre::grouped_mlp_backward", "overwrite_saved");
    const auto& call = may_overwrite(saved, data["kept_in"].toInt()) ? overwrite : keep;
    const auto [dx, dprob, dw1, dbias1, dw2, dbias2, dscale, pending] = call.call(
        dout[0], x, saved, offsets, prob, weight1, bias1, weight2, bias2, bias2_scale, rng, wants,
        false, data["activation"].toStringRef(), data["recipe"].toStringRef(),
        data["keep_h"].toBool(), data["unit_budget"].toInt(), data["window"].toStringRef(),
        place_of, data["x_in_codes"].toBool(), type_of(data["dweight"].toInt()));
    return without_second_derivatives(
        "cadre.GroupedMLP", dout,
        joined(if_wanted(wants[kDx], dx), Tensor(), if_wanted(wants[kDprob], dprob),
               or_none(dw1, counts[0]), or_none(dbias1, counts[1]), or_none(dw2, counts[2]),
               or_none(dbias2, counts[3]), if_wanted(wants[kDbias2Scale], dscale), Tensor(),
               Tensor()));
  }
};

/// As of grouped_linear: `wants` adds to the gradients that the tensors themselves require.
std::tuple<Tensor, Tensor> differentiate(const MlpCall& call, const WeightCopies* copies) {
  const auto& [x, offsets, prob, weight1, bias1, weight2, bias2, bias2_scale, rng, wanted,
               activation, recipe, keep_h, unit_budget, window, place_of, in_codes, x_codes,
               x_scales] = call;
  const MlpWants required{requires_grad(x),
                          requires_grad(prob),
                          requires_grad(weight1),
                          requires_grad(weight2),
                          requires_grad(bias1) || requires_grad(bias2),
                          requires_grad(bias2_scale)};
  const bool grad = at::GradMode::is_enabled() && required != MlpWants{};
  const Maybe state = given_or_drawn(rng, recipe, x);
  if (!grad) {
    refuse_tangents({{"x", x},
                     {"prob", list_of(prob)},
                     {"weight1", weight1},
                     {"bias1", bias1},
                     {"weight2", weight2},
                     {"bias2", bias2},
                     {"bias2_scale", list_of(bias2_scale)}});
    const at::AutoDispatchBelowADInplaceOrView below;
    return forward_op({x, offsets, prob, weight1, bias1, weight2, bias2, bias2_scale, state, wanted,
                       activation, recipe, keep_h, unit_budget, window, place_of,
                       x_codes || x_scales, x_codes, x_scales});
  }
  MlpWants wants = wanted;
  for (size_t i = 0; i < wants.size(); ++i) wants[i] = wants[i] || required[i];
  const Options options{wants,  activation, recipe,  keep_h,   unit_budget,
                        window, place_of,   x_codes, x_scales, copies};
  const variable_list out = MlpFunction::apply(x, offsets, prob, weight1, bias1, weight2, bias2,
                                               bias2_scale, state, options);
  return {out[0], out[1]};
}

std::tuple<Tensor, Tensor> differentiable(const Tensor& x, const Tensor& offsets, const Maybe& prob,
                                          TensorList weight1, TensorList bias1, TensorList weight2,
                                          TensorList bias2, const Maybe& bias2_scale,
                                          const Maybe& rng, MlpWants wants, Text activation,
                                          Text recipe, bool keep_h, int64_t unit_budget,
                                          Text window, const Maybe& place_of, const Maybe& x_codes,
                                          const Maybe& x_scales) {
  return differentiate(
      {x, offsets, prob, weight1, bias1, weight2, bias2, bias2_scale, rng, wants, activation,
       recipe, keep_h, unit_budget, window, place_of, x_codes || x_scales, x_codes, x_scales},
      nullptr);
}

/// x and the parameters in autocast's type; probabilities stay fp32.
template <c10::DispatchKey kKey, c10::DeviceType kDevice>
std::tuple<Tensor, Tensor> autocast(const Tensor& x, const Tensor& offsets, const Maybe& prob,
                                    TensorList weight1, TensorList bias1, TensorList weight2,
                                    TensorList bias2, const Maybe& bias2_scale, const Maybe& rng,
                                    MlpWants wants, Text activation, Text recipe, bool keep_h,
                                    int64_t unit_budget, Text window, const Maybe& place_of,
                                    const Maybe& x_codes, const Maybe& x_scales) {
  const c10::impl::ExcludeDispatchKeyGuard outside(kKey);
  const at::ScalarType type = at::autocast::get_autocast_dtype(kDevice);
  const auto cast = [&](TensorList list) { return cast_for_autocast(type, list, kDevice); };
  const Tensor rows = at::autocast::cached_cast(type, x, kDevice);
  const List w1 = cast(weight1), b1 = cast(bias1), w2 = cast(weight2), b2 = cast(bias2);
  const auto call = [&](TensorList one, TensorList two) {
    return MlpCall{rows,
                   offsets,
                   prob,
                   one,
                   b1,
                   two,
                   b2,
                   bias2_scale,
                   rng,
                   wants,
                   activation,
                   recipe,
                   keep_h,
                   unit_budget,
                   window,
                   place_of,
                   x_codes || x_scales,
                   x_codes,
                   x_scales};
  };
  if (!differentiates_weights(type, weight1, weight2)) return forward_op(call(w1, w2));
  const WeightCopies copies{detached(w1), detached(w2)};
  return differentiate(call(weight1, weight2), &copies);
}

}  // namespace

TORCH_LIBRARY_IMPL(cadre, Autograd, m) {
  m.impl("grouped_mlp", differentiable);
  m.impl("grouped_mlp_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("grouped_mlp_backward.overwrite_saved", torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(cadre, AutocastCUDA, m) {
  m.impl("grouped_mlp", autocast<c10::DispatchKey::AutocastCUDA, c10::DeviceType::CUDA>);
}
TORCH_LIBRARY_IMPL(cadre, AutocastCPU, m) {
  m.impl("grouped_mlp", autocast<c10::DispatchKey::AutocastCPU, c10::DeviceType::CPU>);
}

}  // namespace cadre::door
