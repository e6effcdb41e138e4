#pragma once
#include <map>
#include <memory>

#include "ops/amax_eps.h"
#include "tests/layers/linear_case.h"

// A grouped linear layer put together by hand from its operations: every operand of every product
// is quantised on its own, nothing is shared, cached or kept.
namespace cadre::test {

class LinearComposition {
 public:
  explicit LinearComposition(LinearCase& c) : c_(c), p_(c.p()) {}

  /// Products by the implementation called `product`.
  void run(std::string_view product = {}) {
    product_ = product;
    multiply(Pass::kFprop);
    if (p_.dgrad) multiply(Pass::kDgrad);
    if (p_.wgrad) multiply(Pass::kWgrad);
    if (p_.bias && p_.dbias) bias_grad();
  }

 private:
  enum class Which { kX, kW, kDy };

  /// The operand in its format, from the caller's tensor or a copy made for this product alone.
  Operand operand(Which which, const Format& format, Axis axis) {
    const LinearParameters own = c_.parameters.args();
    const bool weights = which == Which::kW;
    const TensorView source = weights ? own.w : (which == Which::kX ? c_.x : c_.dy).view();
    const DType dtype = weights ? p_.parameters.weight : p_.dtype;
    Operand plain{.codes = source};
    if (weights && own.discrete_w) {
      plain.codes = view(nullptr, dtype, {p_.experts, p_.n, p_.k});
      plain.discrete = own.discrete_w;
    }
    if (is_plain(format) && format.element == dtype) return plain;
    return quantized(which, {format, axis, dtype}, plain);
  }

  struct Copy {
    Format format;
    Axis axis;
    DType source;
  };
  Operand quantized(Which which, const Copy& copy, const Operand& plain) {
    const bool weights = which == Which::kW;
    const int64_t cols = which == Which::kDy ? p_.n : p_.k;
    QuantizeProblem q{.kind = weights ? RowsKind::kWeights : RowsKind::kRagged};
    q.rows = weights ? p_.n : p_.rows;
    q.cols = cols;
    q.experts = p_.experts;
    q.source = copy.source;
    (copy.axis == Axis::kAlongK ? q.along_k : q.along_rows) = copy.format;
    q.role = weights ? TensorRole::kW : which == Which::kX ? p_.x_role : p_.dy_role;
    if (ops::hears_amax_eps(q)) q.amax_eps = p_.options.amax_eps;
    q.discrete = plain.discrete != nullptr;

    const QuantizedShape shape{q.kind, q.rows, cols, p_.experts, copy.format, copy.axis};
    copies_.push_back(std::make_unique<OwnedWorkspace>(quantized_bytes(shape)));
    const QuantizedView made = quantized_view(shape, copies_.back()->get().data);
    QuantizeArgs args{.source = plain.codes, .discrete = plain.discrete};
    if (!weights) args.offsets = offsets();
    (copy.axis == Axis::kAlongK ? args.along_k : args.along_rows) = made;
    args.rng = c_.rng.data();
    launch(plan(q, this_cpu()), args);
    return {.codes = made.codes, .scales = made.scales, .expert_scale = made.expert_scale};
  }

  void multiply(Pass pass) {
    const OperandFormats& f = formats_of(p_.recipe, pass);
    const bool wgrad = pass == Pass::kWgrad;
    const Axis axis = wgrad ? Axis::kAlongRows : Axis::kAlongK;
    GroupedGemmProblem g{.pass = pass, .rows = p_.rows, .n = p_.n, .k = p_.k};
    g.experts = p_.experts;
    g.lhs = f.lhs;
    g.rhs = f.rhs;
    GroupedGemmArgs args;
    args.lhs = operand(pass == Pass::kFprop ? Which::kX : Which::kDy, f.lhs, axis);
    args.rhs = operand(wgrad ? Which::kX : Which::kW, f.rhs,
                       pass == Pass::kFprop ? Axis::kAlongK : Axis::kAlongRows);
    args.offsets = offsets();
    g.discrete_rhs = args.rhs.discrete != nullptr;
    wgrad ? weight_gradient(g, args) : output(g, args);
    launch(plan(g, this_cpu(), product_), args);
  }

  void output(GroupedGemmProblem& g, GroupedGemmArgs& args) {
    const bool fprop = g.pass == Pass::kFprop;
    args.out = (fprop ? c_.y : c_.dx).view();
    g.out = p_.dtype;
    g.rhs_major = p_.parameters.weight_major;
    g.tail = p_.options.tail;
    if (!fprop || !p_.bias) return;
    const LinearParameters own = c_.parameters.args();
    g.bias = true;
    g.discrete_bias = p_.parameters.discrete_bias;
    g.bias_dtype = p_.parameters.bias;
    g.bias_scale = p_.bias_scale;
    args.bias = g.discrete_bias ? view(nullptr, g.bias_dtype, {p_.experts, p_.n}) : own.bias;
    args.discrete_bias = own.discrete_bias;
    if (p_.bias_scale) args.bias_scale = c_.bias_scale.data<float>();
  }

  void weight_gradient(GroupedGemmProblem& g, GroupedGemmArgs& args) {
    const LinearParameters own = c_.parameters.args();
    g.out = p_.parameters.dw;
    g.discrete_out = p_.parameters.discrete_dw;
    g.accumulate = p_.options.accumulate;
    args.out = g.discrete_out ? view(nullptr, g.out, {p_.experts, p_.n, p_.k}) : own.dw;
    args.discrete_out = own.discrete_dw;
    if (p_.options.accumulate >= Accumulate::kDevice) args.accumulate = own.accumulate;
  }

  void bias_grad() {
    const LinearParameters own = c_.parameters.args();
    BiasGradProblem b{.rows = p_.rows, .n = p_.n, .experts = p_.experts, .dy = p_.dtype};
    b.dbias = p_.parameters.dbias;
    b.discrete = p_.parameters.discrete_bias;
    b.bias_scale = p_.bias_scale;
    b.bias = p_.parameters.bias;
    b.accumulate = p_.options.accumulate_bias;
    b.tail = p_.options.tail;
    BiasGradArgs args{.dy = c_.dy.view(), .offsets = offsets(), .dbias = own.dbias};
    args.discrete_dbias = own.discrete_dbias;
    if (p_.bias_scale) {
      args.bias_scale = c_.bias_scale.data<float>();
      args.bias = own.bias;
      args.discrete_bias = own.discrete_bias;
      args.dbias_scale = c_.dbias_scale.data<float>();
    }
    if (p_.options.accumulate_bias >= Accumulate::kDevice) args.accumulate = own.accumulate_bias;
    launch(plan(b, this_cpu()), args);
  }

  Offsets offsets() const { return {c_.offsets.data(), p_.experts}; }

  template <class StepPlan, class Args>
  static void launch(const StepPlan& plan, const Args& args) {
    const OwnedWorkspace w(plan.workspace_bytes);
    cadre::run(plan, args, w.get(), {});
  }

  LinearCase& c_;
  const GroupedLinearProblem& p_;
  std::string_view product_;
  std::vector<std::unique_ptr<OwnedWorkspace>> copies_;
};

}  // namespace cadre::test
