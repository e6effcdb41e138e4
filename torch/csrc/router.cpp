// torch.ops.cadre._router and its gradient: bf16 tokens times the matrix of a router.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "arguments.h"
#include "autograd.h"
#include "door.h"
#include "parameters.h"

namespace cadre::door {
namespace {

using GroupedGemm = Tensor(const Tensor&, TensorList, const Tensor&, c10::string_view, const Maybe&,
                           const Maybe&, const Maybe&, std::optional<at::ScalarType>, int64_t);
using GroupedGemmOut = void(const Tensor&, TensorList, const Tensor&, c10::string_view,
                            const Maybe&, const Maybe&, const Maybe&, int64_t, c10::string_view,
                            const Maybe&, const Maybe&, const Maybe&, TensorList);
using Wants = std::array<bool, 2>;  ///< dx, dweight
using Forward = Tensor(const Tensor&, const Tensor&);
using Backward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                            const Maybe&, Wants);

/// Offsets of experts that have all rows, so many each, the last one what is left.
Tensor all_rows(const Tensor& x, int64_t each) {
  const auto ints = x.options().dtype(at::kInt);
  const int64_t rows = x.size(0);
  if (rows == 0) return at::zeros({2}, ints);
  const Tensor offsets = at::arange(0, rows + each, each, ints);
  return rows % each == 0 ? offsets : offsets.clamp_max_(rows);
}
Tensor all_rows(const Tensor& x) { return all_rows(x, x.size(0)); }

/// Rows that are contracted one after the other. The gradient of a router has few tiles, so that a
/// GPU adds up some of such stretches side by side, each in memory of its own.
int64_t stretch_of(const Tensor& x) {
  constexpr int64_t kLeast = 1024, kMostStretches = 32;
  return std::max(kLeast, (x.size(0) + kMostStretches - 1) / kMostStretches);
}

struct Product {
  c10::string_view which;
  at::ScalarType out;
};

Tensor product(const Product& p, const Tensor& lhs, const Tensor& rhs, const Tensor& offsets) {
  static const auto call = op<GroupedGemm>("cadre::grouped_gemm");
  const c10::impl::ExcludeDispatchKeyGuard exact(c10::autocast_dispatch_keyset);
  return call.call(lhs, rhs, offsets, p.which, {}, {}, {}, p.out, 0);
}

/// dlogits weight + addend, in fp32, rounded once. The addend stays as it is: others may have it.
Tensor dgrad(const Tensor& dy, const Tensor& weight, const Maybe& addend, const Tensor& offsets) {
  const Tensor w = weight.to(at::kBFloat16).unsqueeze(0);
  if (!addend) return product({"dgrad", at::kBFloat16}, dy, w, offsets);
  static const auto call = op<GroupedGemmOut>("cadre::grouped_gemm", "out");
  const Tensor dx = at::empty(addend->sizes(), dy.options());
  const Tensor one = at::ones({1}, dy.options().dtype(at::kFloat));
  const at::NoGradGuard none;  // the gradient of this one is refused by whoever asks for it
  call.call(dy, w, offsets, "dgrad", {}, {}, {}, 0, "no", {}, one, addend->contiguous(), dx);
  return dx;
}

/// bf16 [1 or 3, E, H]: numbers that add up to the weight, the small ones first.
Tensor parts_of(const Tensor& weight) {
  if (weight.scalar_type() == at::kBFloat16) return weight.unsqueeze(0);
  const Tensor parts =
      at::empty({3, weight.size(0), weight.size(1)}, weight.options().dtype(at::kBFloat16));
  Tensor small = parts.select(0, 0), middle = parts.select(0, 1), large = parts.select(0, 2);
  large.copy_(weight);
  const Tensor rest = at::sub(weight.to(at::kFloat), large);
  middle.copy_(rest);
  at::sub_out(small, rest, middle);
  return parts;
}

void check(const Tensor& x, const Tensor& weight) {
  require_same_device(x, weight, "weight");
  require_type(x, at::kBFloat16, "x");
  float_type(weight.scalar_type(), "weight");
  require_memory(weight, "weight");
}

/// fp32 [T, N] = x w^T of all rows of x, with w [1, N, H].
Tensor dense(const Tensor& given_x, const Tensor& given_w) {
  const Tensor x = with_rows(given_x, "x"), w = with_rows(given_w, "weight");
  const Tensor out = at::empty({x.size(0), w.size(1)}, x.options().dtype(at::kFloat));
  const GroupedGemmProblem p{.rows = x.size(0),
                             .n = w.size(1),
                             .k = x.size(1),
                             .lhs = format(FormatKind::kBf16),
                             .rhs = format(FormatKind::kBf16),
                             .out = DType::kF32,
                             .align = alignment({x, w}),
                             .dense = true};
  launch(p,
         GroupedGemmArgs{.lhs = {.codes = view(x, "x")},
                         .rhs = {.codes = view(w, "weight")},
                         .out = view(out, "logits")},
         x);
  return out;
}

Tensor router_logits(const Tensor& x, const Tensor& weight) {
  check(x, weight);
  const Tensor parts = parts_of(weight);
  const int64_t count = parts.size(0), experts = parts.size(1);
  const Tensor products = dense(x, parts.flatten(0, 1).unsqueeze(0));
  return count == 1 ? products : products.view({x.size(0), count, experts}).sum(1);
}

std::tuple<Tensor, Tensor> router_logits_backward(const Tensor& dlogits, const Tensor& x,
                                                  const Tensor& weight, const Maybe& other_dx,
                                                  Wants wants) {
  check(x, weight);
  require_same_device(x, dlogits, "dlogits");
  require_memory(dlogits, "dlogits");
  const auto [wants_dx, wants_dweight] = wants;
  const Tensor dy = dlogits.to(at::kBFloat16), offsets = all_rows(x);
  Tensor dx = at::empty({0}, x.options()), dweight = at::empty({0}, weight.options());
  if (wants_dx) dx = dgrad(dy, weight, other_dx, offsets);
  if (wants_dweight)
    dweight = product({"wgrad", at::kFloat}, dy, x, all_rows(x, stretch_of(x)))
                  .sum(0)
                  .to(weight.scalar_type());
  return {dx, dweight};
}

/// A tensor of the shape of x, whose numbers nobody reads where the weight wants no gradient.
Tensor shape_only(const Tensor& dlogits, const Tensor& weight) {
  return dlogits.new_empty({1}, at::kBFloat16)
      .expand_symint({dlogits.sym_size(0), weight.sym_size(1)});
}

/// x itself is an output too, for whoever else reads it: what they make of its gradient comes back
/// here, and is an addend of the product.
struct Router : torch::autograd::Function<Router> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight) {
    static const auto call = op<Forward>("cadre::_router_logits");
    const at::AutoDispatchBelowADInplaceOrView below;
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({if_wanted(weight.requires_grad(), x), weight});
    return {alias_of(x), call.call(x, weight)};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto call = op<Backward>("cadre::_router_logits_backward");
    const Tensor &other_dx = grads[0], &dlogits = grads[1];
    if (!dlogits.defined()) return {other_dx, Tensor()};
    const variable_list saved = ctx->get_saved_variables();
    const Tensor& weight = saved[1];
    const Tensor x = saved[0].defined() ? saved[0] : shape_only(dlogits, weight);
    const Wants wants{ctx->needs_input_grad(0), ctx->needs_input_grad(1)};
    const auto [dx, dweight] = call.call(dlogits, x, weight, maybe(other_dx), wants);
    return without_second_derivatives("cadre.MoE", grads,
                                      {if_wanted(wants[0], dx), if_wanted(wants[1], dweight)});
  }
};

std::tuple<Tensor, Tensor> router(const Tensor& x, const Tensor& weight) {
  const variable_list out = Router::apply(x, weight);
  return {x.requires_grad() ? out[0] : x, out[1]};
}

void implement(torch::Library& m) {
  m.impl("_router_logits", router_logits);
  m.impl("_router_logits_backward", router_logits_backward);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  m.def("_router(Tensor(a) x, Tensor weight) -> (Tensor(a) same_x, Tensor logits)", router);
  m.def("_router_logits(Tensor x, Tensor weight) -> Tensor");
  m.def(
      "_router_logits_backward(Tensor dlogits, Tensor x, Tensor weight, Tensor? other_dx, "
      "bool[2] wants) -> (Tensor dx, Tensor dweight)");
}
TORCH_LIBRARY_IMPL(cadre, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, CUDA, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, Autograd, m) {
  m.impl("_router_logits", torch::autograd::autogradNotImplementedFallback());
  m.impl("_router_logits_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace cadre::door
