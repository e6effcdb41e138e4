// The gradients of torch.ops.cadre._window_*, which are exchanges too.
#include "autograd.h"
#include "expert_parallel.h"

namespace cadre::door {
namespace {

/// Of an exchange, which lives until its backward.
void keep_exchange(AutogradContext* ctx, Name name) {
  ctx->saved_data["name"] = std::string(name);
  ctx->saved_data["exchange"] = c10::IValue::make_capsule(Exchange::of(name));
}

/// Of both dispatches: what backward needs to know, and backward itself.
struct DispatchGradients {
  at::ScalarType type;  ///< of x, or of the numbers that it has the codes of
  std::array<bool, 2> wants;
  bool prob;

  void keep(AutogradContext* ctx, Name name, const Tensor& x, const ExchangeTensors& map) const {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward(map.list());
    keep_exchange(ctx, name);
    ctx->saved_data["hidden"] = x.sym_size(1);
    ctx->saved_data["type"] = int64_t(type);
    ctx->saved_data["prob"] = prob;
    ctx->saved_data["wants"] = bits_of(wants);
  }

  /// Both gradients travel, also where autograd has only one.
  static variable_list travel(AutogradContext* ctx, const Tensor& of_rows, const Tensor& of_prob,
                              const variable_list& grads) {
    static const auto call = op<DispatchBackwardOp>("cadre::_window_dispatch_backward");
    auto& data = ctx->saved_data;
    const variable_list map = ctx->get_saved_variables();
    const c10::SymInt rows = map[2].sym_size(0);
    const auto type = at::ScalarType(data["type"].toInt());
    std::array<bool, 2> wants{};
    read_bits(data["wants"].toInt(), wants);
    const auto no_rows = [&] {
      const auto exchange = Exchange::of(data["name"].toStringRef());
      if (!exchange->plan().problem.push)
        return map[2].new_zeros_symint({rows, data["hidden"].toSymInt()}, type);
      TORCH_CHECK(!wants[0], "the experts made no gradient of their rows, must push one [",
                  to_string(exchange->plan().problem), "]");
      return exchange->pushed();
    };
    const Tensor drows = of_rows.defined() ? of_rows : no_rows();
    Maybe drow_prob;
    if (data["prob"].toBool())
      drow_prob = of_prob.defined() ? of_prob : map[2].new_zeros_symint({rows}, at::kFloat);
    const auto [dx, dprob] = call.call(data["name"].toStringRef(), drows, drow_prob, map[0], map[1],
                                       map[2], map[3], map[4], map[5], map[6], wants[0], wants[1]);
    return without_second_derivatives("cadre.ExpertParallel", grads,
                                      {if_wanted(wants[0], dx), if_wanted(wants[1], dprob)});
  }
};

struct Dispatch : torch::autograd::Function<Dispatch> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Maybe& prob, Name name,
                               const Tensor& experts) {
    static const auto call = op<DispatchOp>("cadre::_window_dispatch");
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [rows, row_prob, routed, offsets, row_of, slot_of, row_here, verdict, place_of,
                sum_of] = call.call(name, x, experts, prob);
    const ExchangeTensors map{offsets, row_of, slot_of, row_here, verdict, place_of, sum_of};
    const DispatchGradients gradients{
        x.scalar_type(), {requires_grad(x), requires_grad(prob)}, prob.has_value()};
    variable_list constant = map.list();
    constant.push_back(routed);
    if (!gradients.wants[0]) constant.push_back(rows);
    if (!gradients.wants[1]) constant.push_back(row_prob);
    ctx->mark_non_differentiable(constant);
    gradients.keep(ctx, name, x, map);
    return {rows, row_prob, routed, offsets, row_of, slot_of, row_here, verdict, place_of, sum_of};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list in = DispatchGradients::travel(ctx, grads[0], grads[1], grads);
    in.resize(4);
    return in;
  }
};

/// Gradients go through the numbers, and past the codes.
struct DispatchCodes : torch::autograd::Function<DispatchCodes> {
  static variable_list forward(AutogradContext* ctx, const Maybe& numbers, const Maybe& prob,
                               Name name, const Tensor& x, const Tensor& x_scales,
                               const Tensor& experts, bool decode) {
    static const auto call = op<DispatchCodesOp>("cadre::_window_dispatch_codes");
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [rows, scales, row_prob, routed, offsets, row_of, slot_of, row_here, verdict,
                place_of, sum_of, of_rows] =
        call.call(name, x, x_scales, experts, prob, numbers, decode);
    const ExchangeTensors map{offsets, row_of, slot_of, row_here, verdict, place_of, sum_of};
    // Without numbers nothing is differentiable.
    const bool differentiable = numbers.has_value();
    const DispatchGradients gradients{
        of_rows.scalar_type(),
        {requires_grad(numbers), differentiable && requires_grad(prob)},
        prob.has_value()};
    variable_list constant = map.list();
    constant.insert(constant.end(), {routed, rows, scales});
    if (!gradients.wants[0]) constant.push_back(of_rows);
    if (!gradients.wants[1]) constant.push_back(row_prob);
    ctx->mark_non_differentiable(constant);
    gradients.keep(ctx, name, x, map);
    return {rows,    scales,   row_prob, routed,   offsets, row_of,
            slot_of, row_here, verdict,  place_of, sum_of,  of_rows};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list in = DispatchGradients::travel(ctx, grads[11], grads[2], grads);
    in.resize(7);
    return in;
  }
};

struct Collect : torch::autograd::Function<Collect> {
  static Tensor forward(AutogradContext* ctx, const Tensor& y, Name name,
                        const ExchangeTensors& map) {
    static const auto call = op<RowsOp>("cadre::_window_collect");
    const at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward(map.list());
    keep_exchange(ctx, name);
    return call.call(name, y, map.offsets, map.row_of, map.slot_of, map.row_here, map.verdict,
                     map.place_of, map.sum_of);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto call = op<RowsOp>("cadre::_window_collect_backward");
    const variable_list map = ctx->get_saved_variables();
    const Tensor dy = call.call(ctx->saved_data["name"].toStringRef(), grads[0], map[0], map[1],
                                map[2], map[3], map[4], map[5], map[6]);
    return without_second_derivatives("cadre.ExpertParallel", grads, {dy, Tensor(), Tensor()});
  }
};

Dispatched dispatch_autograd(Name name, const Tensor& x, const Tensor& experts, const Maybe& prob) {
  const variable_list out = Dispatch::apply(x, prob, name, experts);
  return {out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[7], out[8], out[9]};
}

DispatchedCodes dispatch_codes_autograd(Name name, const Tensor& x, const Tensor& x_scales,
                                        const Tensor& experts, const Maybe& prob,
                                        const Maybe& numbers, bool decode) {
  const variable_list out = DispatchCodes::apply(numbers, prob, name, x, x_scales, experts, decode);
  return {out[0], out[1], out[2], out[3], out[4],  out[5],
          out[6], out[7], out[8], out[9], out[10], out[11]};
}

Tensor collect_autograd(Name name, const Tensor& y, const Tensor& offsets, const Tensor& row_of,
                        const Tensor& slot_of, const Tensor& row_here, const Tensor& verdict,
                        const Tensor& place_of, const Tensor& sum_of) {
  return Collect::apply(
      y, name, ExchangeTensors{offsets, row_of, slot_of, row_here, verdict, place_of, sum_of});
}

}  // namespace

TORCH_LIBRARY_IMPL(cadre, Autograd, m) {
  m.impl("_window_dispatch", dispatch_autograd);
  m.impl("_window_dispatch_codes", dispatch_codes_autograd);
  m.impl("_window_collect", collect_autograd);
  m.impl("_window_dispatch_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("_window_collect_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace cadre::door
