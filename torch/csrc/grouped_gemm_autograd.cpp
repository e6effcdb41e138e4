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

/// The arguments without a gradient, and how many tensors with one there are.
struct FixedArguments {
  Tensor offsets{};
  std::string which{};
  Maybe alpha{};
  Type out_dtype{};
  int64_t unit_budget = 0;
  int64_t weights = 0;  ///< tensors of rhs
  bool bias = false;
  bool bias_scale = false;
};

/// The tensors that may require a gradient: lhs, rhs..., and bias and bias_scale where present.
struct DifferentiableInputs {
  at::TensorList all;
  const FixedArguments& fixed;

  const Tensor& lhs() const { return all[0]; }
  at::TensorList rhs() const { return all.slice(1, size_t(fixed.weights)); }
  Maybe bias() const { return fixed.bias ? Maybe(all[size_t(1 + fixed.weights)]) : std::nullopt; }
  Maybe bias_scale() const { return fixed.bias_scale ? Maybe(all.back()) : std::nullopt; }
};

/// True for transposed weights; their gradient is computed with the same strides.
bool is_column(const Tensor& w) {
  return w.dim() >= 2 && w.sym_stride(-2) == 1 && w.sym_stride(-1) != 1;
}

/// What forward saved. A tensor that no gradient needs is undefined.
struct SavedForBackward {
  Tensor lhs, offsets;
  Maybe bias, bias_scale, alpha;
  std::vector<Tensor> rhs;
  at::ScalarType lhs_type{}, rhs_type{};
  bool column = false;    ///< weights are transposed
  bool discrete = false;  ///< one tensor an expert
  int64_t unit_budget = 0;

  Tensor gemm(const Tensor& a, at::TensorList b, const char* which, at::ScalarType type) const {
    return grouped_gemm().call(a, b, offsets, which, std::nullopt, std::nullopt, alpha, type,
                               unit_budget);
  }
  /// dy[rows of e]^T x[rows of e] for each expert, with the strides of the weights.
  variable_list weight_gradients(const Tensor& dy, const Tensor& x) const {
    const Tensor dw =
        column ? gemm(x, dy, "wgrad", rhs_type).transpose(1, 2) : gemm(dy, x, "wgrad", rhs_type);
    if (discrete) return dw.unbind(0);
    return {dw};
  }
};

SavedForBackward saved_for_backward(AutogradContext* ctx) {
  auto& data = ctx->saved_data;
  SavedTensors in(ctx->get_saved_variables());
  SavedForBackward saved;
  saved.lhs = in.next();
  saved.offsets = in.next();
  saved.bias = in.next_optional();
  saved.bias_scale = in.next_optional();
  saved.alpha = in.next_optional();
  saved.rhs = in.next_list(data["saved_weights"].toInt());
  saved.lhs_type = data["lhs_type"].toScalarType();
  saved.rhs_type = data["rhs_type"].toScalarType();
  saved.column = data["column"].toBool();
  saved.discrete = data["discrete"].toBool();
  saved.unit_budget = data["unit_budget"].toInt();
  return saved;
}

void save_for_backward(AutogradContext* ctx, const DifferentiableInputs& in) {
  const FixedArguments& fixed = in.fixed;
  const bool bias = requires_grad(in.bias()) || requires_grad(in.bias_scale());
  const at::TensorList weights = requires_grad(in.lhs()) ? in.rhs() : at::TensorList();
  ctx->save_for_backward(joined(requires_grad(in.rhs()) ? in.lhs() : Tensor(), fixed.offsets,
                                bias && fixed.bias_scale ? in.bias() : std::nullopt,
                                bias ? in.bias_scale() : std::nullopt, fixed.alpha, weights));
  const Tensor& rhs = in.rhs()[0];
  auto& data = ctx->saved_data;
  data["saved_weights"] = int64_t(weights.size());
  data["weights"] = fixed.weights;
  data["lhs_type"] = in.lhs().scalar_type();
  data["rhs_type"] = rhs.scalar_type();
  data["bias_type"] = fixed.bias ? in.bias()->scalar_type() : rhs.scalar_type();
  data["column"] = fixed.which != "wgrad" && is_column(rhs);
  data["discrete"] = fixed.which != "wgrad" && rhs.dim() == 2;
  data["unit_budget"] = fixed.unit_budget;
  data["which"] = fixed.which;
  data["bias"] = fixed.bias;
  data["bias_scale"] = fixed.bias_scale;
}

/// The gradients of lhs and of rhs, from the gradient of the output.
struct OperandGradients {
  Tensor lhs{};
  variable_list rhs{};
};

OperandGradients operand_gradients(const SavedForBackward& saved, const std::string& which,
                                   const Tensor& g, std::pair<bool, bool> wants) {
  OperandGradients gradients;
  if (which == "fprop") {
    if (wants.first) gradients.lhs = saved.gemm(g, saved.rhs, "dgrad", saved.lhs_type);
    if (wants.second) gradients.rhs = saved.weight_gradients(g, saved.lhs);
  } else if (which == "dgrad") {
    if (wants.first) gradients.lhs = saved.gemm(g, saved.rhs, "fprop", saved.lhs_type);
    if (wants.second) gradients.rhs = saved.weight_gradients(saved.lhs, g);
  } else {
    if (wants.first) gradients.lhs = saved.gemm(saved.rhs[0], g, "fprop", saved.lhs_type);
    if (wants.second) gradients.rhs = {saved.gemm(saved.lhs, g, "dgrad", saved.rhs_type)};
  }
  return gradients;
}

struct GroupedGemm : torch::autograd::Function<GroupedGemm> {
  static Tensor forward(AutogradContext* ctx, at::TensorList all, const FixedArguments& fixed) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const DifferentiableInputs in{all, fixed};
    save_for_backward(ctx, in);
    return grouped_gemm().call(in.lhs(), in.rhs(), fixed.offsets, fixed.which, in.bias(),
                               in.bias_scale(), fixed.alpha, fixed.out_dtype, fixed.unit_budget);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto bias_grad = op<BiasGradOp>("cadre::bias_grad");
    // Types were chosen in forward, whatever torch.autocast says by now.
    const c10::impl::ExcludeDispatchKeyGuard outside(c10::autocast_dispatch_keyset);
    const SavedForBackward saved = saved_for_backward(ctx);
    auto& data = ctx->saved_data;
    const auto weights = size_t(data["weights"].toInt());
    const bool bias = data["bias"].toBool(), scale = data["bias_scale"].toBool();
    const auto wants = [&](size_t from, size_t count) {
      for (size_t i = from; i < from + count; ++i)
        if (ctx->needs_input_grad(i)) return true;
      return false;
    };
    const std::pair operands{wants(0, 1), wants(1, weights)};
    auto gradients = operand_gradients(saved, data["which"].toStringRef(), grads[0], operands);
    Tensor dbias, dbias_scale;
    if (bias && wants(1 + weights, scale ? 2 : 1))
      std::tie(dbias, dbias_scale) = bias_grad.call(grads[0], saved.offsets, saved.bias_scale,
                                                    saved.bias, data["bias_type"].toScalarType());
    variable_list all = joined(gradients.lhs, or_none(gradients.rhs, int64_t(weights)));
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
  m.impl("scaled_grouped_mm", torch::autograd::autogradNotImplementedFallback());
  m.impl("grouped_gemm", [](const Tensor& lhs, at::TensorList rhs, const Tensor& offsets,
                            c10::string_view which, const Maybe& bias, const Maybe& bias_scale,
                            const Maybe& alpha, Type out_dtype, int64_t unit_budget) {
    TORCH_CHECK_NOT_IMPLEMENTED(!requires_grad(alpha),
                                "alpha requires a gradient, must not; it has none");
    TORCH_CHECK_VALUE(!rhs.empty(), "rhs has no tensors, must have 1 or more");
    const variable_list all = joined(lhs, rhs, list_of(bias), list_of(bias_scale));
    const FixedArguments fixed{.offsets = offsets,
                               .which = std::string(which),
                               .alpha = alpha,
                               .out_dtype = out_dtype,
                               .unit_budget = unit_budget,
                               .weights = int64_t(rhs.size()),
                               .bias = bias.has_value(),
                               .bias_scale = bias_scale.has_value()};
    return GroupedGemm::apply(at::TensorList(all), fixed);
  });
}
TORCH_LIBRARY_IMPL(cadre, AutocastCPU, m) {
  m.impl("grouped_gemm", autocast<at::kCPU, c10::DispatchKey::AutocastCPU>());
}
TORCH_LIBRARY_IMPL(cadre, AutocastCUDA, m) {
  m.impl("grouped_gemm", autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>());
}

}  // namespace cadre::door
