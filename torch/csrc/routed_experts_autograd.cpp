// The gradient of torch.ops.cadre.routed_experts, and its rule for torch.autocast.
#include "autograd.h"
#include "moe.h"

namespace cadre::door {
namespace {

using Outputs = std::tuple<Tensor, Tensor, Tensor>;
using Forward = Outputs(const Tensor&, const Tensor&, const Tensor&, int64_t, TensorList,
                        TensorList, TensorList, TensorList, const Maybe&, MoeWants, Text, Text,
                        bool, bool);
using List = std::vector<Tensor>;
using Gradients = std::tuple<Tensor, Tensor, List, List, List, List>;
using Backward = Gradients(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t,
                           TensorList, TensorList, TensorList, TensorList, const Maybe&, MoeWants,
                           Text, Text, bool, bool, std::optional<at::ScalarType>);

/// What is no tensor, from forward to backward.
struct Options {
  int64_t num_experts;
  MoeWants wants;
  Text activation, recipe;
  bool keep_h, keep_rows;
  const WeightCopies* copies = nullptr;  ///< multiplied in place of the weights, if there are any
};

/// The tensors of a forward.
struct Inputs {
  const Tensor &x, &experts, &prob;
  TensorList weight1, bias1, weight2, bias2;
  const Maybe& rng;
};

Outputs forward_op(const Inputs& in, const Options& o) {
  static const auto call = op<Forward>("cadre::routed_experts");
  return call.call(in.x, in.experts, in.prob, o.num_experts, in.weight1, in.bias1, in.weight2,
                   in.bias2, in.rng, o.wants, o.activation, o.recipe, o.keep_h, o.keep_rows);
}

class RoutedFunction : public torch::autograd::Function<RoutedFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& experts,
                               const Tensor& prob, TensorList weight1, TensorList bias1,
                               TensorList weight2, TensorList bias2, const Maybe& rng,
                               const Options& o) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const TensorList read1 = o.copies ? TensorList(o.copies->weight1) : weight1;
    const TensorList read2 = o.copies ? TensorList(o.copies->weight2) : weight2;
    const auto [out, offsets, saved] =
        forward_op({x, experts, prob, read1, bias1, read2, bias2, rng}, o);
    ctx->set_materialize_grads(false);
    const int64_t top_k = experts.sym_size(1).expect_int();
    const bool reads_x = o.wants[kDw1] && !o.keep_rows && backward_reads_tokens(x, o.recipe, top_k);
    ctx->save_for_backward(
        joined(if_wanted(reads_x, x), offsets, alias_of(saved), rng, read1, bias1, read2, bias2));
    ctx->saved_data["dweight"] = type_number(weight1, o.copies);
    ctx->saved_data["top_k"] = top_k;
    ctx->saved_data["wants"] = bits_of(o.wants);
    ctx->saved_data["kept_in"] = kept_in(saved);
    ctx->saved_data["activation"] = std::string(o.activation);
    ctx->saved_data["recipe"] = std::string(o.recipe);
    ctx->saved_data["keep_h"] = o.keep_h;
    ctx->saved_data["keep_rows"] = o.keep_rows;
    ctx->saved_data["counts"] =
        c10::List<int64_t>({int64_t(weight1.size()), int64_t(bias1.size()), int64_t(weight2.size()),
                            int64_t(bias2.size())});
    return {out, offsets, saved};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& d) {
    refuse_batches(d);
    auto& data = ctx->saved_data;
    const Tensor& dout = d[0];
    const c10::List<int64_t> counts = data["counts"].toIntList();
    if (!dout.defined())
      return variable_list(size_t(counts[0] + counts[1] + counts[2] + counts[3]) + 5);
    SavedTensors in(ctx->get_saved_variables());
    const Tensor x = in.next(), offsets = in.next(), saved = in.next();
    const Maybe rng = in.next_optional();
    const List weight1 = in.next_list(counts[0]), bias1 = in.next_list(counts[1]);
    const List weight2 = in.next_list(counts[2]), bias2 = in.next_list(counts[3]);
    MoeWants wants;
    read_bits(data["wants"].toInt(), wants);
    static const auto keep = op<Backward>("cadre::routed_experts_backward");
    static const auto overwrite = op<Backward>("cadre::routed_experts_backward", "overwrite_saved");
    const auto& call = may_overwrite(saved, data["kept_in"].toInt()) ? overwrite : keep;
    const auto [dx, dprob, dw1, dbias1, dw2, dbias2] =
        call.call(dout, x_or_its_shape(x, dout, weight1[0]), offsets, saved, data["top_k"].toInt(),
                  weight1, bias1, weight2, bias2, rng, wants, data["activation"].toStringRef(),
                  data["recipe"].toStringRef(), data["keep_h"].toBool(), data["keep_rows"].toBool(),
                  type_of(data["dweight"].toInt()));
    return without_second_derivatives(
        "cadre.routed_experts", d,
        joined(if_wanted(wants[kDx], dx), Tensor(), if_wanted(wants[kDlogits], dprob),
               or_none(dw1, counts[0]), or_none(dbias1, counts[1]), or_none(dw2, counts[2]),
               or_none(dbias2, counts[3]), Tensor(), Tensor()));
  }
};

/// As of moe: `wants` adds to the gradients that the tensors themselves require, and the gradient
/// of prob is made with that of bias2.
Outputs differentiate(const Inputs& in, Options options) {
  const auto& [x, experts, prob, weight1, bias1, weight2, bias2, rng] = in;
  const MoeWants required{requires_grad(x), requires_grad(prob), requires_grad(weight1),
                          requires_grad(weight2), requires_grad(bias1) || requires_grad(bias2)};
  const bool grad = at::GradMode::is_enabled() && required != MoeWants{};
  const Maybe state = given_or_drawn(rng, options.recipe, x);
  if (!grad) {
    refuse_tangents({{"x", x},
                     {"prob", prob},
                     {"weight1", weight1},
                     {"bias1", bias1},
                     {"weight2", weight2},
                     {"bias2", bias2}});
    const at::AutoDispatchBelowADInplaceOrView below;
    return forward_op({x, experts, prob, weight1, bias1, weight2, bias2, state}, options);
  }
  MoeWants& wants = options.wants;
  for (size_t i = 0; i < wants.size(); ++i) wants[i] = wants[i] || required[i];
  wants[kDbias] = wants[kDbias] || (wants[kDlogits] && !bias2.empty());
  const variable_list out =
      RoutedFunction::apply(x, experts, prob, weight1, bias1, weight2, bias2, state, options);
  return {out[0], out[1], out[2]};
}

Outputs differentiable(const Tensor& x, const Tensor& experts, const Tensor& prob,
                       int64_t num_experts, TensorList weight1, TensorList bias1,
                       TensorList weight2, TensorList bias2, const Maybe& rng, MoeWants wants,
                       Text activation, Text recipe, bool keep_h, bool keep_rows) {
  return differentiate({x, experts, prob, weight1, bias1, weight2, bias2, rng},
                       {num_experts, wants, activation, recipe, keep_h, keep_rows});
}

/// x and the parameters in autocast's type; prob stays as it is.
template <c10::DispatchKey kKey, c10::DeviceType kDevice>
Outputs autocast(const Tensor& x, const Tensor& experts, const Tensor& prob, int64_t num_experts,
                 TensorList weight1, TensorList bias1, TensorList weight2, TensorList bias2,
                 const Maybe& rng, MoeWants wants, Text activation, Text recipe, bool keep_h,
                 bool keep_rows) {
  const c10::impl::ExcludeDispatchKeyGuard outside(kKey);
  const at::ScalarType type = at::autocast::get_autocast_dtype(kDevice);
  const auto cast = [&](TensorList list) { return cast_for_autocast(type, list, kDevice); };
  const Tensor tokens = at::autocast::cached_cast(type, x, kDevice);
  const List w1 = cast(weight1), b1 = cast(bias1), w2 = cast(weight2), b2 = cast(bias2);
  Options options{num_experts, wants, activation, recipe, keep_h, keep_rows};
  if (!differentiates_weights(type, weight1, weight2))
    return forward_op({tokens, experts, prob, w1, b1, w2, b2, rng}, options);
  const WeightCopies copies{detached(w1), detached(w2)};
  options.copies = &copies;
  return differentiate({tokens, experts, prob, weight1, b1, weight2, b2, rng}, options);
}

}  // namespace

TORCH_LIBRARY_IMPL(cadre, Autograd, m) {
  m.impl("routed_experts", differentiable);
  m.impl("routed_experts_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("routed_experts_backward.overwrite_saved",
         torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(cadre, AutocastCUDA, m) {
  m.impl("routed_experts", autocast<c10::DispatchKey::AutocastCUDA, c10::DeviceType::CUDA>);
}
TORCH_LIBRARY_IMPL(cadre, AutocastCPU, m) {
  m.impl("routed_experts", autocast<c10::DispatchKey::AutocastCPU, c10::DeviceType::CPU>);
}

}  // namespace cadre::door
