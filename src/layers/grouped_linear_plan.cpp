// Planning a grouped linear layer: which tensors are copied into which format, where the copies
// lie, and which implementation runs each step.
#include "cadre/error.h"
#include "cadre/grouped_linear.h"
#include "layers/checks.h"
#include "layers/explain.h"
#include "layers/memory.h"
#include "layers/problem_fields.h"

namespace cadre {

template <class Io, class Problem>
static void fields(Io& io, Problem& p) {
  const GroupedLinearProblem usual;
  io.always("R", p.rows);
  io.always("N", p.n);
  io.always("K", p.k);
  io.always("E", p.experts);
  io.always("recipe", p.recipe);
  layers::parameter_fields(io, p);
  io.unless("bias", p.bias, usual.bias);
  io.unless("bias_scale", p.bias_scale, usual.bias_scale);
  io.unless("return_bias", p.return_bias, usual.return_bias);
  io.unless("dgrad", p.dgrad, usual.dgrad);
  io.unless("wgrad", p.wgrad, usual.wgrad);
  io.unless("dbias", p.dbias, usual.dbias);
  layers::option_fields(io, p);
  io.unless("x_role", p.x_role, usual.x_role);
  io.unless("dy_role", p.dy_role, usual.dy_role);
}

std::string to_string(const GroupedLinearProblem& p) {
  return ops::write_problem("grouped_linear", p);
}

GroupedLinearProblem parse_grouped_linear_problem(std::string_view words) {
  return ops::read_problem<GroupedLinearProblem>("grouped_linear", words);
}

namespace {

using layers::Layout;

/// True if a product can read a tensor of this type as it is.
bool as_is(const Format& format, DType dtype) {
  return is_plain(format) && format.element == dtype;
}

/// True if the copies along K and along rows hold the same codes and scales, so that one serves
/// both: square blocks, one scale per expert, or a plain cast; and nothing random.
bool same_copy(const Format& along_k, const Format& along_rows) {
  return along_k == along_rows && !along_k.hadamard && !along_k.stochastic &&
         (along_k.square || info(along_k.kind).block == 0);
}

void check(const GroupedLinearProblem& p) {
  const ops::Checks checks("grouped_linear", p);
  layers::check_layer_problem(checks, p);
  checks.at_least("N", p.n, 1);
  checks.at_least("K", p.k, 1);
  checks.holds(p.bias || !p.bias_scale, "bias_scale is yes, must be no; the problem has no bias");
  checks.holds(p.bias || !p.return_bias, "return_bias is yes, must be no; the problem has no bias");
  checks.holds(!p.return_bias || !p.bias_scale,
               "bias_scale is yes, must be no; a returned bias is scaled by the caller");
  const bool w_as_is = as_is(p.recipe.fprop.rhs, p.parameters.weight) &&
                       (!p.dgrad || as_is(p.recipe.dgrad.rhs, p.parameters.weight));
  checks.holds(p.parameters.weight_major == Major::kRow || w_as_is,
               "weight_major is column, must be row; the recipe copies the weights");
  checks.holds(!p.save_input || !p.wgrad || !p.recipe.wgrad.rhs.stochastic,
               "save_input is yes, must be no; x is rounded stochastically for wgrad, and a second "
               "quantisation would give other codes");
}

/// The formats of a tensor's two copies; empty where no copy is needed.
struct Copies {
  std::optional<Format> along_k, along_rows;
};

class Planner {
 public:
  Planner(const GroupedLinearProblem& problem, const Device& device) : p_(problem) {
    plan_.problem = problem;
    plan_.device = device;
  }

  GroupedLinearPlan take() {
    place_x();
    place_w();
    place_dy();
    choose_products();
    count_memory();
    return std::move(plan_);
  }

 private:
  QuantizedShape rows_shape(int64_t cols, const Format& format, Axis axis) const {
    return {RowsKind::kRagged, p_.rows, cols, p_.experts, format, axis};
  }
  QuantizedShape weights_shape(const Format& format, Axis axis) const {
    return {RowsKind::kWeights, p_.n, p_.k, p_.experts, format, axis};
  }

  void place_x() {
    const Format& fprop = p_.recipe.fprop.lhs;
    const Format& wgrad = p_.recipe.wgrad.rhs;
    const bool copies_fprop = !as_is(fprop, p_.dtype);
    const bool copies_wgrad = p_.wgrad && !as_is(wgrad, p_.dtype);
    const bool shared = copies_wgrad && !p_.save_input && same_copy(fprop, wgrad);
    if (copies_fprop)
      plan_.fprop_x = (shared ? saved_ : forward_)
                          .take(shared ? Place::kSaved : Place::kWorkspace,
                                rows_shape(p_.k, fprop, Axis::kAlongK));
    if (shared) {
      plan_.wgrad_x = plan_.fprop_x;
    } else if (copies_wgrad) {
      plan_.wgrad_x = (p_.save_input ? pending_ : saved_)
                          .take(p_.save_input ? Place::kPending : Place::kSaved,
                                rows_shape(p_.k, wgrad, Axis::kAlongRows));
    }
    Copies now, again;
    if (copies_fprop) now.along_k = fprop;
    if (copies_wgrad && !shared) (p_.save_input ? again : now).along_rows = wgrad;
    plan_.quantize_x = quantize_rows(now, p_.k, p_.x_role);
    plan_.quantize_x_again = quantize_rows(again, p_.k, p_.x_role);
  }

  void place_w() {
    const Format& fprop = p_.recipe.fprop.rhs;
    const Format& dgrad = p_.recipe.dgrad.rhs;
    const bool copies_fprop = !as_is(fprop, p_.parameters.weight);
    const bool copies_dgrad = p_.dgrad && !as_is(dgrad, p_.parameters.weight);
    const bool cached = p_.cache_weights;
    const bool shared = cached && copies_fprop && copies_dgrad && same_copy(fprop, dgrad);
    const Place place = cached ? Place::kWeightCache : Place::kWorkspace;
    if (copies_fprop)
      plan_.fprop_w = (cached ? cache_ : forward_).take(place, weights_shape(fprop, Axis::kAlongK));
    if (shared) {
      plan_.dgrad_w = plan_.fprop_w;
    } else if (copies_dgrad) {
      plan_.dgrad_w =
          (cached ? cache_ : backward_).take(place, weights_shape(dgrad, Axis::kAlongRows));
    }
    Copies now, again;
    if (copies_fprop) now.along_k = fprop;
    if (copies_dgrad && !shared) (cached ? now : again).along_rows = dgrad;
    plan_.quantize_w = quantize_weights(now);
    plan_.quantize_w_again = quantize_weights(again);
  }

  void place_dy() {
    const Format& dgrad = p_.recipe.dgrad.lhs;
    const Format& wgrad = p_.recipe.wgrad.lhs;
    const bool copies_dgrad = p_.dgrad && !as_is(dgrad, p_.dtype);
    const bool copies_wgrad = p_.wgrad && !as_is(wgrad, p_.dtype);
    const bool shared = copies_dgrad && copies_wgrad && same_copy(dgrad, wgrad);
    if (copies_dgrad)
      plan_.dgrad_dy = (shared ? pending_ : backward_)
                           .take(shared ? Place::kPending : Place::kWorkspace,
                                 rows_shape(p_.n, dgrad, Axis::kAlongK));
    if (shared) {
      plan_.wgrad_dy = plan_.dgrad_dy;
    } else if (copies_wgrad) {
      plan_.wgrad_dy = pending_.take(Place::kPending, rows_shape(p_.n, wgrad, Axis::kAlongRows));
    }
    Copies now;
    if (copies_dgrad) now.along_k = dgrad;
    if (copies_wgrad && !shared) now.along_rows = wgrad;
    plan_.quantize_dy = quantize_rows(now, p_.n, p_.dy_role);
  }

  std::optional<QuantizePlan> quantize_rows(const Copies& copies, int64_t cols, TensorRole role) {
    QuantizeProblem q{.kind = RowsKind::kRagged, .rows = p_.rows, .cols = cols};
    q.source = p_.dtype;
    q.role = role;
    return quantize(q, copies);
  }
  std::optional<QuantizePlan> quantize_weights(const Copies& copies) {
    QuantizeProblem q{.kind = RowsKind::kWeights, .rows = p_.n, .cols = p_.k};
    q.source = p_.parameters.weight;
    q.role = TensorRole::kW;
    q.discrete = p_.parameters.discrete_weight;
    return quantize(q, copies);
  }
  std::optional<QuantizePlan> quantize(QuantizeProblem q, const Copies& copies) {
    if (!copies.along_k && !copies.along_rows) return {};
    q.experts = p_.experts;
    q.along_k = copies.along_k;
    q.along_rows = copies.along_rows;
    q.amax_eps = p_.amax_eps;
    return plan(q, plan_.device);
  }

  /// What the three products have in common.
  GroupedGemmProblem product(Pass pass) const {
    const OperandFormats& formats = formats_of(p_.recipe, pass);
    GroupedGemmProblem g{.pass = pass, .rows = p_.rows, .n = p_.n, .k = p_.k};
    g.experts = p_.experts;
    g.lhs = formats.lhs;
    g.rhs = formats.rhs;
    g.unit_budget = p_.unit_budget;
    g.align = p_.align;
    return g;
  }

  /// fprop and dgrad: w by their operand plan, y or dx out.
  GroupedGemmProblem ragged_rows(Pass pass, const OperandPlan& w) const {
    GroupedGemmProblem g = product(pass);
    const bool own = w.place == Place::kCaller;
    g.discrete_rhs = own && p_.parameters.discrete_weight;
    g.rhs_major = p_.parameters.weight_major;
    g.out = p_.dtype;
    g.tail = p_.tail;
    return g;
  }

  void choose_products() {
    GroupedGemmProblem fprop = ragged_rows(Pass::kFprop, plan_.fprop_w);
    fprop.bias = p_.bias && !p_.return_bias;
    fprop.discrete_bias = fprop.bias && p_.parameters.discrete_bias;
    fprop.bias_scale = p_.bias_scale;
    if (fprop.bias) fprop.bias_dtype = p_.parameters.bias;
    plan_.fprop = plan(fprop, plan_.device);
    if (p_.dgrad) plan_.dgrad = plan(ragged_rows(Pass::kDgrad, plan_.dgrad_w), plan_.device);
    if (p_.wgrad) {
      GroupedGemmProblem wgrad = product(Pass::kWgrad);
      wgrad.out = p_.parameters.dw;
      wgrad.out_major = p_.parameters.weight_major;
      wgrad.discrete_out = p_.parameters.discrete_dw;
      wgrad.accumulate = p_.accumulate;
      plan_.wgrad = plan(wgrad, plan_.device);
    }
    if (fprop.bias && p_.dbias) choose_bias_grad();
    const bool copies = plan_.quantize_x || plan_.quantize_w || plan_.quantize_dy ||
                        plan_.quantize_x_again || plan_.quantize_w_again;
    plan_.name = copies ? "quantized" : "direct";
    plan_.exact = plan_.fprop->exact && (!plan_.dgrad || plan_.dgrad->exact) &&
                  (!plan_.wgrad || plan_.wgrad->exact);
  }

  void choose_bias_grad() {
    BiasGradProblem b{.rows = p_.rows, .n = p_.n, .experts = p_.experts, .dy = p_.dtype};
    b.dbias = p_.parameters.dbias;
    b.discrete = p_.parameters.discrete_bias;
    b.bias_scale = p_.bias_scale;
    if (p_.bias_scale) b.bias = p_.parameters.bias;
    b.accumulate = p_.accumulate_bias;
    b.tail = p_.tail;
    plan_.bias_grad = plan(b, plan_.device);
  }

  /// The largest workspace of the steps that a plan has.
  template <class... Plans>
  static int64_t scratch(const Plans&... plans) {
    return std::max({int64_t(0), (plans ? plans->workspace_bytes : 0)...});
  }

  void count_memory() {
    LayerMemory& m = plan_.memory;
    plan_.forward_copies_bytes = forward_.bytes();
    plan_.backward_copies_bytes = backward_.bytes();
    plan_.pending_bytes = pending_.bytes();
    m.saved_bytes = saved_.bytes();
    m.weight_cache_bytes = cache_.bytes();
    m.forward_workspace_bytes =
        forward_.bytes() + scratch(plan_.quantize_w, plan_.quantize_x, plan_.fprop);
    m.backward_workspace_bytes =
        backward_.bytes() + scratch(plan_.quantize_dy, plan_.quantize_w_again,
                                    plan_.quantize_x_again, plan_.dgrad, plan_.bias_grad);
    if (p_.deferred) {
      m.pending_bytes = pending_.bytes();
      m.wgrad_workspace_bytes = scratch(plan_.wgrad);
    } else {
      m.backward_workspace_bytes =
          pending_.bytes() + std::max(m.backward_workspace_bytes, scratch(plan_.wgrad));
    }
  }

  const GroupedLinearProblem& p_;
  GroupedLinearPlan plan_;
  Layout forward_, backward_, saved_, pending_, cache_;
};

}  // namespace

GroupedLinearPlan plan(const GroupedLinearProblem& problem, const Device& device) {
  check(problem);
  return Planner(problem, device).take();
}

std::vector<KeptPart> kept(const GroupedLinearPlan& plan) {
  const GroupedLinearProblem& p = plan.problem;
  std::vector<KeptPart> parts;
  if (p.wgrad && (plan.wgrad_x.place == Place::kCaller || p.save_input)) {
    parts.push_back({"x", Place::kCaller, p.rows * bytes_for(p.dtype, p.k)});
  } else if (p.wgrad) {
    parts.push_back({"x along rows", Place::kSaved, quantized_bytes(plan.wgrad_x.shape)});
  }
  if (plan.bias_grad && p.bias_scale)
    parts.push_back({"bias_scale", Place::kCaller, p.rows * int64_t(sizeof(float))});
  return parts;
}

std::string explain(const GroupedLinearPlan& plan) {
  using layers::explain_step;
  return text(to_string(plan.problem), "\nroute ", plan.name, plan.exact ? "" : ", not exact", "\n",
              "forward\n", explain_step("quantize w", plan.quantize_w),
              explain_step("quantize x", plan.quantize_x), explain_step("multiply", plan.fprop),
              "backward\n", explain_step("quantize dy", plan.quantize_dy),
              explain_step("quantize w", plan.quantize_w_again), explain_step("dx", plan.dgrad),
              explain_step("dbias", plan.bias_grad),
              explain_step("quantize x", plan.quantize_x_again),
              explain_step(plan.problem.deferred ? "dw, deferred" : "dw", plan.wgrad),
              layers::explain_memory(plan.memory, kept(plan), plan.problem.rows));
}

}  // namespace cadre
