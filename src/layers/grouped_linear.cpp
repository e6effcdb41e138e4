// Running a grouped linear layer: a straight sequence of operations.
#include "layers/grouped_linear.h"

#include "backend/poison.h"

namespace cadre {

static constexpr std::string_view kOp = "grouped_linear";

namespace layers {
namespace {

bool refreshes_weights(const LinearRun& linear) {
  return !linear.plan.problem.cache_weights || linear.args.refresh_weights;
}

Operand weights(const LinearRun& linear) {
  const GroupedLinearProblem& p = linear.plan.problem;
  const LinearParameters& own = linear.args.parameters;
  if (!p.parameters.discrete_weight) return {.codes = own.w};
  return {.codes = weight_layout(p, p.parameters.weight), .discrete = own.discrete_w};
}

/// The copies of a tensor that a quantise step writes.
struct Copies {
  const OperandPlan &along_k, &along_rows;
};

bool draws(const std::optional<Format>& format) { return format && format->stochastic; }

/// Runs a quantise step, if the plan has it.
struct Quantize {
  const LinearRun& linear;
  Workspace scratch;

  void operator()(const std::optional<QuantizePlan>& step, const Operand& source,
                  const Copies& copies) const {
    if (!step) return;
    const QuantizeProblem& q = step->problem;
    const Places places = linear.places();
    QuantizeArgs args;
    args.source = source.codes;
    args.discrete = source.discrete;
    if (q.kind == RowsKind::kRagged) args.offsets = linear.args.offsets;
    if (q.along_k) args.along_k = places.copy(copies.along_k);
    if (q.along_rows) args.along_rows = places.copy(copies.along_rows);
    if (draws(q.along_k) || draws(q.along_rows)) args.rng = linear.args.rng;
    run(*step, args, scratch, linear.stream);
  }
};

BiasGradArgs bias_grad_args(const LinearRun& linear) {
  const BiasGradProblem& b = linear.plan.bias_grad->problem;
  const LinearParameters& own = linear.args.parameters;
  BiasGradArgs args;
  args.dy = linear.args.dy;
  args.offsets = linear.args.offsets;
  if (b.discrete) {
    args.discrete_dbias = own.discrete_dbias;
  } else {
    args.dbias = own.dbias;
  }
  if (b.bias_scale) {
    args.bias_scale = linear.args.bias_scale;
    args.dbias_scale = linear.args.dbias_scale;
    (b.discrete ? void(args.discrete_bias = own.discrete_bias) : void(args.bias = own.bias));
  }
  if (b.accumulate == Accumulate::kDevice || b.accumulate == Accumulate::kPerExpert)
    args.accumulate = own.accumulate_bias;
  return args;
}

void poison(const LinearRun& linear, void* data, int64_t bytes) {
  backend::poison(linear.plan.device, {data, bytes}, linear.stream);
}

}  // namespace

GroupedGemmArgs fprop_args(const LinearRun& linear) {
  const GroupedGemmProblem& fprop = linear.plan.fprop->problem;
  const Places places = linear.places();
  GroupedGemmArgs args;
  args.lhs = places.read(linear.plan.fprop_x, {.codes = linear.args.x});
  args.rhs = places.read(linear.plan.fprop_w, weights(linear));
  args.offsets = linear.args.offsets;
  args.out = linear.args.y;
  if (fprop.discrete_bias) {
    args.bias = view(nullptr, fprop.bias_dtype, {fprop.experts, fprop.n});
    args.discrete_bias = linear.args.parameters.discrete_bias;
  } else if (fprop.bias) {
    args.bias = linear.args.parameters.bias;
  }
  if (fprop.bias_scale) args.bias_scale = linear.args.bias_scale;
  return args;
}

GroupedGemmArgs dgrad_args(const LinearRun& linear) {
  const Places places = linear.places();
  GroupedGemmArgs args;
  args.lhs = places.read(linear.plan.dgrad_dy, {.codes = linear.args.dy});
  args.rhs = places.read(linear.plan.dgrad_w, weights(linear));
  args.offsets = linear.args.offsets;
  args.out = linear.args.dx;
  return args;
}

GroupedGemmArgs wgrad_args(const LinearRun& linear) {
  const GroupedLinearProblem& p = linear.plan.problem;
  const LinearParameters& own = linear.args.parameters;
  const Places places = linear.places();
  GroupedGemmArgs args;
  args.lhs = places.read(linear.plan.wgrad_dy, {.codes = linear.args.dy});
  args.rhs = places.read(linear.plan.wgrad_x, {.codes = linear.args.x});
  args.offsets = linear.args.offsets;
  args.out = p.parameters.discrete_dw ? weight_layout(p, p.parameters.dw) : own.dw;
  if (p.parameters.discrete_dw) args.discrete_out = own.discrete_dw;
  if (p.accumulate == Accumulate::kDevice || p.accumulate == Accumulate::kPerExpert)
    args.accumulate = own.accumulate;
  return args;
}

TensorView weight_layout(const GroupedLinearProblem& p, DType dtype) {
  if (p.parameters.weight_major == Major::kRow) return view(nullptr, dtype, {p.experts, p.n, p.k});
  return view(nullptr, dtype, {p.experts, p.n, p.k}, {p.n * p.k, 1, p.n});
}

void multiply(const LinearRun& linear) {
  const GroupedLinearPlan& plan = linear.plan;
  const Quantize quantize{linear, behind(linear.workspace, plan.forward_copies_bytes)};
  poison(linear, linear.workspace.data, plan.forward_copies_bytes);
  poison(linear, linear.args.saved.data, plan.memory.saved_bytes);

  if (refreshes_weights(linear))
    quantize(plan.quantize_w, weights(linear), {plan.fprop_w, plan.dgrad_w});
  quantize(plan.quantize_x, {.codes = linear.args.x}, {plan.fprop_x, plan.wgrad_x});
  run(*plan.fprop, fprop_args(linear), quantize.scratch, linear.stream);
}

void gradients(const LinearRun& linear) {
  const GroupedLinearPlan& plan = linear.plan;
  const Quantize quantize{linear, behind(linear.workspace, plan.backward_copies_bytes)};
  poison(linear, linear.workspace.data, plan.backward_copies_bytes);
  poison(linear, linear.args.pending.data, plan.pending_bytes);

  quantize(plan.quantize_dy, {.codes = linear.args.dy}, {plan.dgrad_dy, plan.wgrad_dy});
  quantize(plan.quantize_w_again, weights(linear), {plan.fprop_w, plan.dgrad_w});
  if (plan.dgrad) run(*plan.dgrad, dgrad_args(linear), quantize.scratch, linear.stream);
  if (plan.bias_grad) run(*plan.bias_grad, bias_grad_args(linear), quantize.scratch, linear.stream);
}

void keep_input(const LinearRun& linear) {
  const GroupedLinearPlan& plan = linear.plan;
  const Quantize quantize{linear, behind(linear.workspace, plan.backward_copies_bytes)};
  quantize(plan.quantize_x_again, {.codes = linear.args.x}, {plan.fprop_x, plan.wgrad_x});
}

void weigh(const LinearRun& linear) {
  const GroupedLinearPlan& plan = linear.plan;
  if (plan.wgrad) run(*plan.wgrad, wgrad_args(linear), linear.workspace, linear.stream);
}

namespace {

/// Backward keeps what wgrad reads at the start of its workspace, unless it is deferred.
GroupedLinearArgs with_pending(const GroupedLinearPlan& plan, const GroupedLinearArgs& args,
                               Workspace workspace) {
  GroupedLinearArgs own = args;
  if (!plan.problem.deferred) own.pending = {workspace.data, plan.pending_bytes};
  return own;
}
Workspace behind_pending(const GroupedLinearPlan& plan, Workspace workspace) {
  return behind(workspace, plan.problem.deferred ? 0 : plan.pending_bytes);
}

}  // namespace

void check_backward(const GroupedLinearPlan& plan, const GroupedLinearArgs& args,
                    Workspace workspace) {
  const ops::Checks checks(kOp, plan.problem);
  check_run(checks, plan.name, workspace, plan.memory.backward_workspace_bytes);
  checks.holds(plan.dgrad || plan.wgrad || plan.bias_grad,
               "dgrad, wgrad and dbias are no, must be yes for one of them; backward has nothing "
               "to compute");
  check_queue(checks, args.queue, 1);
  const GroupedLinearArgs own = with_pending(plan, args, workspace);
  const LinearRun linear{plan, own, behind_pending(plan, workspace)};
  check_gradients(kOp, linear);
  if (!plan.problem.deferred || args.queue != nullptr) check_wgrad(kOp, linear);
}

void defer(const LinearRun& linear) {
  if (linear.args.queue != nullptr && linear.plan.wgrad)
    linear.args.queue->push(linear.plan, linear.args);
}

}  // namespace layers

void forward(const GroupedLinearPlan& plan, const GroupedLinearArgs& args, Workspace workspace,
             Stream stream) {
  const layers::LinearRun linear{plan, args, workspace, stream};
  layers::check_run(ops::Checks(kOp, plan.problem), plan.name, workspace,
                    plan.memory.forward_workspace_bytes);
  layers::check_forward(kOp, linear);
  layers::multiply(linear);
}

void backward(const GroupedLinearPlan& plan, const GroupedLinearArgs& args, Workspace workspace,
              Stream stream) {
  layers::check_backward(plan, args, workspace);
  const GroupedLinearArgs own = layers::with_pending(plan, args, workspace);
  const layers::LinearRun linear{plan, own, layers::behind_pending(plan, workspace), stream};

  layers::gradients(linear);
  layers::keep_input(linear);
  plan.problem.deferred ? layers::defer(linear) : layers::weigh(linear);
}

void wgrad(const GroupedLinearPlan& plan, const GroupedLinearArgs& args, Workspace workspace,
           Stream stream) {
  const layers::LinearRun linear{plan, args, workspace, stream};
  const ops::Checks checks(kOp, plan.problem);
  layers::check_run(checks, plan.name, workspace, plan.memory.wgrad_workspace_bytes);
  checks.holds(plan.problem.deferred && plan.wgrad,
               "no weight gradient is deferred, must be one; plan with deferred=yes and wgrad=yes");
  layers::check_wgrad(kOp, linear);
  layers::weigh(linear);
}

}  // namespace cadre
