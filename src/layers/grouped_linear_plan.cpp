// Planning a grouped linear layer: which tensors are copied into which format, where the copies
// lie, and which implementation runs each step.
#include "cadre/error.h"
#include "cadre/grouped_linear.h"
#include "layers/checks.h"
#include "layers/explain.h"
#include "layers/grouped_linear.h"
#include "layers/planner.h"
#include "layers/problem_fields.h"
#include "layers/route.h"

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

using enum layers::linear::Tensor;

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
  checks.countable("R * N", {p.rows, p.n});
  checks.countable("R * K", {p.rows, p.k});
  checks.countable("E * N * K", {p.experts, p.n, p.k});
  checks.holds(p.bias || !p.bias_scale, "bias_scale is yes, must be no; the problem has no bias");
  checks.holds(p.bias || !p.return_bias, "return_bias is yes, must be no; the problem has no bias");
  checks.holds(!p.return_bias || !p.bias_scale,
               "bias_scale is yes, must be no; a returned bias is scaled by the caller");
  const bool w_as_is = as_is(p.recipe.fprop.rhs, p.parameters.weight) &&
                       (!p.dgrad || as_is(p.recipe.dgrad.rhs, p.parameters.weight));
  checks.holds(p.parameters.weight_major == Major::kRow || w_as_is,
               "weight_major is column, must be row; the recipe copies the weights");
  const bool x_as_is =
      as_is(p.recipe.fprop.lhs, p.dtype) && (!p.wgrad || as_is(p.recipe.wgrad.rhs, p.dtype));
  checks.holds(!p.options.quantized_x || !x_as_is,
               "quantized_x is yes, must be no; the recipe reads x as it is");
  checks.holds(!p.options.quantized_x || !p.options.save_input,
               "save_input is yes, must be no; x comes quantised and is not quantised again");
  checks.holds(!p.options.save_input || !p.wgrad || !p.recipe.wgrad.rhs.stochastic,
               "save_input is yes, must be no; x is rounded stochastically for wgrad, and a second "
               "quantisation would give other codes");
}

/// A tensor with its two copies, and which of the three a product reads.
struct Copied {
  int itself, along_k, along_rows;
  bool copies_k = false, copies_rows = false, shared = false;
  bool given = false;  ///< the copies are the caller's

  bool copies() const { return copies_k || copies_rows; }
  int read_along_k() const { return copies_k ? along_k : itself; }
  int read_along_rows() const { return shared ? along_k : copies_rows ? along_rows : itself; }
};

/// Which tensors the recipe copies.
struct Copies {
  Copied x{kX, kXAlongK, kXAlongRows};
  Copied w{kW, kWAlongK, kWAlongRows};
  Copied dy{kDy, kDyAlongK, kDyAlongRows};

  explicit Copies(const GroupedLinearProblem& p) {
    const Recipe& r = p.recipe;
    const DType weight = p.parameters.weight;
    x.copies_k = !as_is(r.fprop.lhs, p.dtype);
    x.copies_rows = p.wgrad && !as_is(r.wgrad.rhs, p.dtype);
    x.given = p.options.quantized_x;
    x.shared = x.copies_rows && !p.options.save_input && same_copy(r.fprop.lhs, r.wgrad.rhs);
    w.copies_k = !as_is(r.fprop.rhs, weight);
    w.copies_rows = p.dgrad && !as_is(r.dgrad.rhs, weight);
    w.shared = p.options.cache_weights && w.copies_k && w.copies_rows &&
               same_copy(r.fprop.rhs, r.dgrad.rhs);
    dy.copies_k = p.dgrad && !as_is(r.dgrad.lhs, p.dtype);
    dy.copies_rows = p.wgrad && !as_is(r.wgrad.lhs, p.dtype);
    dy.shared = dy.copies_k && dy.copies_rows && same_copy(r.dgrad.lhs, r.wgrad.lhs);
  }
};

std::string refuses_copies(const GroupedLinearProblem& p, const Device&) {
  const Copies copies(p);
  const auto why = [](std::string_view tensor, const Copied& of, const Format& along_k,
                      const Format& along_rows) {
    return text(tensor, of.given ? " comes in " : " is copied into ",
                to_string(of.copies_k ? along_k : along_rows));
  };
  const Recipe& r = p.recipe;
  if (copies.w.copies()) return why("w", copies.w, r.fprop.rhs, r.dgrad.rhs);
  if (copies.x.copies()) return why("x", copies.x, r.fprop.lhs, r.wgrad.rhs);
  if (copies.dy.copies()) return why("dy", copies.dy, r.dgrad.lhs, r.wgrad.lhs);
  return {};
}

std::string refuses_none(const GroupedLinearProblem& p, const Device& device) {
  return refuses_copies(p, device).empty() ? "every product reads its tensors as they are" : "";
}

class Planner {
 public:
  Planner(const GroupedLinearProblem& problem, const Device& device)
      : p_(problem), copies_(problem), row_(plan_) {
    plan_.problem = problem;
    plan_.device = device;
  }

  GroupedLinearPlan take() {
    name_tensors();
    add_forward();
    add_backward();
    if (p_.wgrad) add_wgrad();
    row_.share_memory(p_.options.deferred ? layers::WgradRuns::kLater : layers::WgradRuns::kAfter);
    return std::move(plan_);
  }

 private:
  /// In the order of linear::Tensor.
  void name_tensors() {
    for (const char* own :
         {"x", "y", "dy", "dx", "w", "dw", "bias", "dbias", "bias_scale", "dbias_scale"})
      row_.own(own);
    const Recipe& r = p_.recipe;
    x_copy("x along K", rows_shape(p_.k, r.fprop.lhs, Axis::kAlongK));
    x_copy("x along rows", rows_shape(p_.k, r.wgrad.rhs, Axis::kAlongRows));
    row_.made("w along K", weights_shape(r.fprop.rhs, Axis::kAlongK), p_.options.cache_weights);
    row_.made("w along rows", weights_shape(r.dgrad.rhs, Axis::kAlongRows),
              p_.options.cache_weights);
    row_.made("dy along K", rows_shape(p_.n, r.dgrad.lhs, Axis::kAlongK));
    row_.made("dy along rows", rows_shape(p_.n, r.wgrad.lhs, Axis::kAlongRows));
  }
  void x_copy(const char* name, const QuantizedShape& shape) {
    x_.given ? row_.own(name, shape) : row_.made(name, shape);
  }
  QuantizedShape rows_shape(int64_t cols, const Format& format, Axis axis) const {
    return {RowsKind::kRagged, p_.rows, cols, p_.experts, format, axis};
  }
  QuantizedShape weights_shape(const Format& format, Axis axis) const {
    return {RowsKind::kWeights, p_.n, p_.k, p_.experts, format, axis};
  }

  void add_forward() {
    const bool rows_of_w = p_.options.cache_weights && w_.copies_rows && !w_.shared;
    const bool rows_of_x = !p_.options.save_input && x_.copies_rows && !x_.shared;
    quantize(Phase::kForward, "quantize w", w_, {.along_k = w_.copies_k, .along_rows = rows_of_w});
    quantize(Phase::kForward, "quantize x", x_, {.along_k = x_.copies_k, .along_rows = rows_of_x});
    GroupedGemmProblem fprop = ragged_rows(Pass::kFprop, w_.read_along_k());
    fprop.bias = adds_bias();
    fprop.discrete_bias = fprop.bias && p_.parameters.discrete_bias;
    fprop.bias_scale = p_.bias_scale;
    if (fprop.bias) fprop.bias_dtype = p_.parameters.bias;
    row_.step(Phase::kForward, "multiply", plan(fprop, plan_.device),
              {x_.read_along_k(), w_.read_along_k(), fprop.bias ? kBias : kNone,
               fprop.bias_scale ? kBiasScale : kNone},
              {kY});
  }

  void add_backward() {
    const bool rows_of_w = !p_.options.cache_weights && w_.copies_rows;
    const bool rows_of_x = p_.options.save_input && x_.copies_rows;
    quantize(Phase::kBackward, "quantize dy", dy_,
             {.along_k = dy_.copies_k, .along_rows = dy_.copies_rows && !dy_.shared});
    quantize(Phase::kBackward, "quantize w again", w_, {.along_rows = rows_of_w});
    if (p_.dgrad)
      row_.step(Phase::kBackward, "dx",
                plan(ragged_rows(Pass::kDgrad, w_.read_along_rows()), plan_.device),
                {dy_.read_along_k(), w_.read_along_rows()}, {kDx});
    if (adds_bias() && p_.dbias) add_bias_grad();
    quantize(Phase::kInputAgain, "quantize x again", x_, {.along_rows = rows_of_x});
  }

  /// Which copies a step makes.
  struct Axes {
    bool along_k = false, along_rows = false;
  };
  void quantize(Phase phase, const char* name, const Copied& tensor, const Axes& axes) {
    if (tensor.given || (!axes.along_k && !axes.along_rows)) return;
    const QuantizedShape& like = plan_.tensors[size_t(tensor.along_k)].shape;
    const bool weights = like.kind == RowsKind::kWeights;
    QuantizeProblem q{.kind = like.kind, .rows = like.rows, .cols = like.cols};
    q.experts = p_.experts;
    q.source = weights ? p_.parameters.weight : p_.dtype;
    q.role = weights ? TensorRole::kW : tensor.itself == kX ? p_.x_role : p_.dy_role;
    q.discrete = weights && p_.parameters.discrete_weight;
    q.amax_eps = p_.options.amax_eps;
    if (axes.along_k) q.along_k = like.format;
    if (axes.along_rows) q.along_rows = plan_.tensors[size_t(tensor.along_rows)].shape.format;
    row_.step(phase, name, plan(q, plan_.device), {tensor.itself},
              {axes.along_k ? tensor.along_k : kNone, axes.along_rows ? tensor.along_rows : kNone});
  }

  /// What the three products have in common.
  GroupedGemmProblem product(Pass pass) const {
    const OperandFormats& formats = formats_of(p_.recipe, pass);
    GroupedGemmProblem g{.pass = pass, .rows = p_.rows, .n = p_.n, .k = p_.k};
    g.experts = p_.experts;
    g.lhs = formats.lhs;
    g.rhs = formats.rhs;
    g.unit_budget = p_.options.unit_budget;
    g.align = p_.options.align;
    return g;
  }

  /// fprop and dgrad: w or its copy, y or dx out.
  GroupedGemmProblem ragged_rows(Pass pass, int w) const {
    GroupedGemmProblem g = product(pass);
    g.discrete_rhs = w == kW && p_.parameters.discrete_weight;
    g.rhs_major = p_.parameters.weight_major;
    g.out = p_.dtype;
    g.tail = p_.options.tail;
    return g;
  }

  void add_wgrad() {
    GroupedGemmProblem wgrad = product(Pass::kWgrad);
    wgrad.out = p_.parameters.dw;
    wgrad.out_major = p_.parameters.weight_major;
    wgrad.discrete_out = p_.parameters.discrete_dw;
    wgrad.accumulate = p_.options.accumulate;
    row_.step(Phase::kWgrad, "dw", plan(wgrad, plan_.device),
              {dy_.read_along_rows(), x_.read_along_rows()}, {kDw});
  }

  bool adds_bias() const { return p_.bias && !p_.return_bias; }
  void add_bias_grad() {
    BiasGradProblem b{.rows = p_.rows, .n = p_.n, .experts = p_.experts, .dy = p_.dtype};
    b.dbias = p_.parameters.dbias;
    b.discrete = p_.parameters.discrete_bias;
    b.bias_scale = p_.bias_scale;
    if (p_.bias_scale) b.bias = p_.parameters.bias;
    b.accumulate = p_.options.accumulate_bias;
    b.tail = p_.options.tail;
    const bool scaled = p_.bias_scale;
    row_.step(Phase::kBackward, "dbias", plan(b, plan_.device),
              {kDy, scaled ? kBias : kNone, scaled ? kBiasScale : kNone},
              {kDbias, scaled ? kDbiasScale : kNone});
  }

  const GroupedLinearProblem& p_;
  const Copies copies_;
  const Copied &x_ = copies_.x, &w_ = copies_.w, &dy_ = copies_.dy;
  GroupedLinearPlan plan_;
  layers::Row row_;
};

GroupedLinearPlan plan_steps(const GroupedLinearProblem& problem, const Device& device) {
  return Planner(problem, device).take();
}

/// The steps are the same; what is copied makes the route.
constexpr layers::Route<GroupedLinearProblem, GroupedLinearPlan> kRoutes[] = {
    {"direct", refuses_copies, plan_steps},
    {"quantized", refuses_none, plan_steps},
};

}  // namespace

namespace layers {

const LayerTensor& wgrad_gradient(const GroupedLinearPlan& plan) {
  return plan.tensors[size_t(plan.steps.back().reads[0])];
}
const LayerTensor& wgrad_input(const GroupedLinearPlan& plan) {
  return plan.tensors[size_t(plan.steps.back().reads[1])];
}

}  // namespace layers

GroupedLinearPlan plan(const GroupedLinearProblem& problem, const Device& device,
                       std::string_view only) {
  check(problem);
  return layers::choose<GroupedLinearPlan, GroupedLinearProblem>(kRoutes, problem, device, only);
}

std::vector<KeptPart> kept(const GroupedLinearPlan& plan) {
  const GroupedLinearProblem& p = plan.problem;
  std::vector<KeptPart> parts;
  if (p.wgrad) {
    const LayerTensor& x = layers::wgrad_input(plan);
    const bool given = p.options.quantized_x && &x != &plan.tensors[kX];
    if (x.place == Place::kSaved || given)
      parts.push_back({"x along rows", x.place, x.layout.bytes});
    else
      parts.push_back({"x", Place::kCaller, p.rows * bytes_for(p.dtype, p.k)});
  }
  if (p.bias_scale && find_step<BiasGradPlan>(plan, "dbias"))
    parts.push_back({"bias_scale", Place::kCaller, p.rows * int64_t(sizeof(float))});
  return parts;
}

std::string explain(const GroupedLinearPlan& plan) {
  return layers::explain_head(plan.problem, plan) + layers::explain_steps(plan) +
         layers::explain_memory(plan.memory, kept(plan), plan.problem.rows);
}

}  // namespace cadre
