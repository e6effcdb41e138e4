// The gradient of torch.ops.cadre.grouped_linear, and its rule for torch.autocast.
#include "autograd.h"
#include "grouped_linear.h"

namespace cadre::door {

std::tuple<Tensor, Tensor> linear_op(const LinearCall& c) {
  using Signature =
      std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, TensorList, TensorList, const Maybe&,
                                 const Maybe&, LinearWants, Text, bool, int64_t);
  static const auto call = op<Signature>("cadre::grouped_linear");
  return call.call(c.x, c.offsets, c.weight, c.bias, c.bias_scale, c.rng, c.wants, c.recipe,
                   c.save_input, c.unit_budget);
}

LinearGradients linear_backward_op(const Tensor& dy, const Tensor& x, const Tensor& saved,
                                   const LinearCall& c,
                                   std::optional<at::ScalarType> dweight_dtype) {
  using Signature = LinearGradients(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                    TensorList, TensorList, const Maybe&, const Maybe&, LinearWants,
                                    bool, Text, bool, int64_t, std::optional<at::ScalarType>);
  static const auto call = op<Signature>("cadre::grouped_linear_backward");
  return call.call(dy, x, saved, c.offsets, c.weight, c.bias, c.bias_scale, c.rng, c.wants, false,
                   c.recipe, c.save_input, c.unit_budget, dweight_dtype);
}

namespace {

/// What is no tensor, from forward to backward.
struct Options {
  LinearWants wants;
  Text recipe;
  bool save_input;
  int64_t unit_budget;
  Tensor* saved;               ///< written: it has no gradient, so it is no output of the function
  const WeightCopies* copies;  ///< multiplied in place of the weights, if there are any
};

class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& offsets,
                               TensorList weight, TensorList bias, const Maybe& bias_scale,
                               const Maybe& rng, const Options& o) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const TensorList read = o.copies ? TensorList(o.copies->weight1) : weight;
    const LinearCall call{x,   offsets, read,     bias,         bias_scale,
                          rng, o.wants, o.recipe, o.save_input, o.unit_budget};
    const auto [y, saved] = linear_op(call);
    *o.saved = saved;
    const Tensor bytes = saved.sym_numel() == 0 ? Tensor() : saved;
    ctx->save_for_backward(
        joined(if_wanted(reads_x(call), x), offsets, bytes, bias_scale, rng, read, bias));
    ctx->saved_data["numbers"] = std::vector<int64_t>{
        bits_of(o.wants),       o.save_input,         o.unit_budget,
        int64_t(weight.size()), int64_t(bias.size()), type_number(weight, o.copies)};
    if (!o.recipe.empty()) ctx->saved_data["recipe"] = std::string(o.recipe);
    return {y};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& dout) {
    refuse_batches(dout);
    const std::vector<int64_t> numbers = ctx->saved_data["numbers"].toIntVector();
    const auto named = ctx->saved_data.find("recipe");
    const std::string recipe = named == ctx->saved_data.end() ? "" : named->second.toStringRef();
    const int64_t weights = numbers[3], biases = numbers[4];
    LinearWants wants;
    read_bits(numbers[0], wants);
    SavedTensors in(ctx->get_saved_variables());
    const Tensor kept = in.next(), offsets = in.next(), saved = in.next();
    const Maybe bias_scale = in.next_optional(), rng = in.next_optional();
    const std::vector<Tensor> weight = in.next_list(weights), bias = in.next_list(biases);
    const Tensor x = x_or_its_shape(kept, dout[0], weight[0]);
    const auto [dx, dw, dbias, dbias_scale, pending] = linear_backward_op(
        dout[0], x, saved_or_empty(saved, dout[0]),
        {x, offsets, weight, bias, bias_scale, rng, wants, recipe, numbers[1] != 0, numbers[2]},
        type_of(numbers[5]));
    const bool scaled = wants[kWantsDbiasScale];
    return without_second_derivatives(
        "cadre.GroupedLinear", dout,
        joined(if_wanted(wants[kWantsDx], dx), Tensor(), or_none(dw, weights),
               or_none(dbias, biases), if_wanted(scaled, dbias_scale), Tensor(), Tensor()));
  }
};

/// `wants` adds to the gradients that the tensors themselves require: a traced forward runs
/// where no tensor does.
std::tuple<Tensor, Tensor> differentiate(const LinearCall& call, const WeightCopies* copies) {
  const auto& [x, offsets, weight, bias, bias_scale, rng, wants, recipe, save_input, unit_budget] =
      call;
  const bool grad =
      at::GradMode::is_enabled() && (requires_grad(x) || requires_grad(weight) ||
                                     requires_grad(bias) || requires_grad(bias_scale));
  const Maybe state = given_or_drawn(rng, recipe, x);
  if (!grad) {
    refuse_tangents(
        {{"x", x}, {"weight", weight}, {"bias", bias}, {"bias_scale", list_of(bias_scale)}});
    const at::AutoDispatchBelowADInplaceOrView below;
    return linear_op(
        {x, offsets, weight, bias, bias_scale, state, wants, recipe, save_input, unit_budget});
  }
  const LinearWants required{wants[kWantsDx] || requires_grad(x),
                             wants[kWantsDw] || requires_grad(weight),
                             wants[kWantsDbias] || requires_grad(bias),
                             wants[kWantsDbiasScale] || requires_grad(bias_scale)};
  Tensor saved;
  const Options options{required, recipe, save_input, unit_budget, &saved, copies};
  const variable_list out =
      LinearFunction::apply(x, offsets, weight, bias, bias_scale, state, options);
  return {out[0], saved};
}

std::tuple<Tensor, Tensor> differentiable(const Tensor& x, const Tensor& offsets, TensorList weight,
                                          TensorList bias, const Maybe& bias_scale,
                                          const Maybe& rng, LinearWants wants, Text recipe,
                                          bool save_input, int64_t unit_budget) {
  return differentiate(
      {x, offsets, weight, bias, bias_scale, rng, wants, recipe, save_input, unit_budget}, nullptr);
}

/// x and the parameters in autocast's type.
template <c10::DispatchKey kKey, c10::DeviceType kDevice>
std::tuple<Tensor, Tensor> autocast(const Tensor& x, const Tensor& offsets, TensorList weight,
                                    TensorList bias, const Maybe& bias_scale, const Maybe& rng,
                                    LinearWants wants, Text recipe, bool save_input,
                                    int64_t unit_budget) {
  const c10::impl::ExcludeDispatchKeyGuard outside(kKey);
  const at::ScalarType type = at::autocast::get_autocast_dtype(kDevice);
  const Tensor rows = at::autocast::cached_cast(type, x, kDevice);
  const std::vector<Tensor> w = cast_for_autocast(type, weight, kDevice),
                            b = cast_for_autocast(type, bias, kDevice);
  if (!differentiates_weights(type, weight))
    return linear_op(
        {rows, offsets, w, b, bias_scale, rng, wants, recipe, save_input, unit_budget});
  const WeightCopies copies{detached(w)};
  return differentiate(
      {rows, offsets, weight, b, bias_scale, rng, wants, recipe, save_input, unit_budget}, &copies);
}

}  // namespace

TORCH_LIBRARY_IMPL(cadre, Autograd, m) {
  m.impl("grouped_linear", differentiable);
  m.impl("grouped_linear_backward", torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(cadre, AutocastCUDA, m) {
  m.impl("grouped_linear", autocast<c10::DispatchKey::AutocastCUDA, c10::DeviceType::CUDA>);
}
TORCH_LIBRARY_IMPL(cadre, AutocastCPU, m) {
  m.impl("grouped_linear", autocast<c10::DispatchKey::AutocastCPU, c10::DeviceType::CPU>);
}

}  // namespace cadre::door
