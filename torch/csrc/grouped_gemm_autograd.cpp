#include <ATen/autocast_mode.h>

#include <string>
#include <tuple>

#include "autograd.h"
#include "door.h"

// The gradients of torch.ops.cadre.grouped_gemm, each made by the same operation, and its autocast.
namespace cadre::door {
namespace {

using Type = std::optional<at::ScalarType>;

using GroupedGemmOp = Tensor(const Tensor&, at::TensorList, const Tensor&, c10::string_view,
                             const Maybe&, const Maybe&, const Maybe&, Type, int64_t);
using BiasGradOp = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Maybe&,
                                              const Maybe&, Type);

const auto& grouped_gemm() {
  static const auto found = op<GroupedGemmOp>("cadre::grouped_gemm");
  return found;
}

/// What a call says beside the tensors that may learn.
struct Call {
  Tensor offsets{};
  std::string which{};
  Maybe alpha{};
  Type out_dtype{};
  int64_t unit_budget = 0;
  int64_t weights = 0;  ///< tensors of rhs
  bool bias = false;
  bool bias_scale = false;
};

/// The tensors that may learn: lhs, rhs..., bias, bias_scale, those that there are.
struct Inputs {
  at::TensorList all;
  const Call& call;

  const Tensor& lhs() const { return all[0]; }
  at::TensorList rhs() const { return all.slice(1, size_t(call.weights)); }
  Maybe bias() const { return call.bias ? Maybe(all[size_t(1 + call.weights)]) : std::nullopt; }
  Maybe bias_scale() const { return call.bias_scale ? Maybe(all.back()) : std::nullopt; }
};

/// True for weights that lie transposed; their gradient is made to lie as they do.
bool is_column(const Tensor& w) {
  return w.dim() >= 2 && w.sym_stride(-2) == 1 && w.sym_stride(-1) != 1;
}

/// What backward has: tensors that were kept, undefined where no gradient needs them.
struct Kept {
  Tensor lhs, offsets;
  Maybe bias, bias_scale, alpha;
  std::vector<Tensor> rhs;
  at::ScalarType lhs_type{}, rhs_type{};
  bool column = false;    ///< weights lie transposed
  bool discrete = false;  ///< one tensor an expert
  int64_t unit_budget = 0;

  Tensor product(const Tensor& a, at::TensorList b, const char* which, at::ScalarType type) const {
    return grouped_gemm().call(a, b, offsets, which, std::nullopt, std::nullopt, alpha, type,
                               unit_budget);
  }
  /// dy[rows of e]^T x[rows of e] for each expert, as the weights lie.
  variable_list weight_gradients(const Tensor& dy, const Tensor& x) const {
    const Tensor dw = column ? product(x, dy, "wgrad", rhs_type).transpose(1, 2)
                             : product(dy, x, "wgrad", rhs_type);
    if (discrete) return dw.unbind(0);
    return {dw};
  }
};

Kept kept_of(AutogradContext* ctx) {
  auto& data = ctx->saved_data;
  Saved saved(ctx->get_saved_variables());
  Kept kept;
  kept.lhs = saved.one();
  kept.offsets = saved.one();
  kept.bias = saved.maybe();
  kept.bias_scale = saved.maybe();
  kept.alpha = saved.maybe();
  kept.rhs = saved.list(data["saved_weights"].toInt());
  kept.lhs_type = data["lhs_type"].toScalarType();
  kept.rhs_type = data["rhs_type"].toScalarType();
  kept.column = data["column"].toBool();
  kept.discrete = data["discrete"].toBool();
  kept.unit_budget = data["unit_budget"].toInt();
  return kept;
}

void keep(AutogradContext* ctx, const Inputs& in) {
  const Call& call = in.call;
  const bool bias = learns(in.bias()) || learns(in.bias_scale());
  const at::TensorList weights = learns(in.lhs()) ? in.rhs() : at::TensorList();
  ctx->save_for_backward(joined(learns(in.rhs()) ? in.lhs() : Tensor(), call.offsets,
                                bias && call.bias_scale ? in.bias() : std::nullopt,
                                bias ? in.bias_scale() : std::nullopt, call.alpha, weights));
  const Tensor& rhs = in.rhs()[0];
  auto& data = ctx->saved_data;
  data["saved_weights"] = int64_t(weights.size());
  data["weights"] = call.weights;
  data["lhs_type"] = in.lhs().scalar_type();
  data["rhs_type"] = rhs.scalar_type();
  data["bias_type"] = call.bias ? in.bias()->scalar_type() : rhs.scalar_type();
  data["column"] = call.which != "wgrad" && is_column(rhs);
  data["discrete"] = call.which != "wgrad" && rhs.dim() == 2;
  data["unit_budget"] = call.unit_budget;
  data["which"] = call.which;
  data["bias"] = call.bias;
  data["bias_scale"] = call.bias_scale;
}

/// The gradients of lhs and of rhs, from the gradient of the output.
struct OperandGradients {
  Tensor lhs{};
  variable_list rhs{};
};

OperandGradients operand_gradients(const Kept& kept, const std::string& which, const Tensor& g,
                                   std::pair<bool, bool> wants) {
  OperandGradients made;
  if (which == "fprop") {
    if (wants.first) made.lhs = kept.product(g, kept.rhs, "dgrad", kept.lhs_type);
    if (wants.second) made.rhs = kept.weight_gradients(g, kept.lhs);
  } else if (which == "dgrad") {
    if (wants.first) made.lhs = kept.product(g, kept.rhs, "fprop", kept.lhs_type);
    if (wants.second) made.rhs = kept.weight_gradients(kept.lhs, g);
  } else {
    if (wants.first) made.lhs = kept.product(kept.rhs[0], g, "fprop", kept.lhs_type);
    if (wants.second) made.rhs = {kept.product(kept.lhs, g, "dgrad", kept.rhs_type)};
  }
  return made;
}

struct GroupedGemm : torch::autograd::Function<GroupedGemm> {
  static Tensor forward(AutogradContext* ctx, at::TensorList all, const Call& call) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Inputs in{all, call};
    keep(ctx, in);
    return grouped_gemm().call(in.lhs(), in.rhs(), call.offsets, call.which, in.bias(),
                               in.bias_scale(), call.alpha, call.out_dtype, call.unit_budget);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto bias_grad = op<BiasGradOp>("cadre::bias_grad");
    const Kept kept = kept_of(ctx);
    auto& data = ctx->saved_data;
    const auto weights = size_t(data["weights"].toInt());
    const bool bias = data["bias"].toBool(), scale = data["bias_scale"].toBool();
    const auto wants = [&](size_t from, size_t count) {
      for (size_t i = from; i < from + count; ++i)
        if (ctx->needs_input_grad(i)) return true;
      return false;
    };
    const std::pair operands{wants(0, 1), wants(1, weights)};
    auto made = operand_gradients(kept, data["which"].toStringRef(), grads[0], operands);
    Tensor dbias, dbias_scale;
    if (bias && wants(1 + weights, scale ? 2 : 1))
      std::tie(dbias, dbias_scale) = bias_grad.call(grads[0], kept.offsets, kept.bias_scale,
                                                    kept.bias, data["bias_type"].toScalarType());
    variable_list all = joined(made.lhs, or_none(made.rhs, int64_t(weights)));
    if (bias) all.push_back(dbias);
    if (scale) all.push_back(dbias_scale);
    all.emplace_back();
    return all;
  }
};

/// Operands in autocast's type; the bias and the factors are added in fp32 anyway.
template <at::DeviceType kDevice, c10::DispatchKey kKey>
auto autocast() {
  return [](const Tensor& lhs, at::TensorList rhs, const Tensor& offsets, c10::string_view which,
            const Maybe& bias, const Maybe& bias_scale, const Maybe& alpha, Type out_dtype,
            int64_t unit_budget) {
    const c10::impl::ExcludeDispatchKeyGuard below(kKey);
    const auto type = at::autocast::get_autocast_dtype(kDevice);
    return grouped_gemm().call(at::autocast::cached_cast(type, lhs, kDevice),
                               at::autocast::cached_cast(type, rhs, kDevice), offsets, which, bias,
                               bias_scale, alpha, out_dtype, unit_budget);
  };
}

}  // namespace

TORCH_LIBRARY_IMPL(cadre, Autograd, m) {
  m.impl("bias_grad", torch::autograd::autogradNotImplementedFallback());
  m.impl("grouped_gemm", [](const Tensor& lhs, at::TensorList rhs, const Tensor& offsets,
                            c10::string_view which, const Maybe& bias, const Maybe& bias_scale,
                            const Maybe& alpha, Type out_dtype, int64_t unit_budget) {
    TORCH_CHECK_NOT_IMPLEMENTED(!learns(alpha), "alpha requires a gradient, must not; it has none");
    TORCH_CHECK_VALUE(!rhs.empty(), "rhs has no tensors, must have 1 or more");
    const variable_list all = joined(lhs, rhs, bias ? at::TensorList(*bias) : at::TensorList(),
                                     bias_scale ? at::TensorList(*bias_scale) : at::TensorList());
    const Call call{.offsets = offsets,
                    .which = std::string(which),
                    .alpha = alpha,
                    .out_dtype = out_dtype,
                    .unit_budget = unit_budget,
                    .weights = int64_t(rhs.size()),
                    .bias = bias.has_value(),
                    .bias_scale = bias_scale.has_value()};
    return GroupedGemm::apply(at::TensorList(all), call);
  });
}
TORCH_LIBRARY_IMPL(cadre, AutocastCPU, m) {
  m.impl("grouped_gemm", autocast<at::kCPU, c10::DispatchKey::AutocastCPU>());
}
TORCH_LIBRARY_IMPL(cadre, AutocastCUDA, m) {
  m.impl("grouped_gemm", autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>());
}

}  // namespace cadre::door
