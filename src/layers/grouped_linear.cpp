// Running a grouped linear layer: its tensors by their numbers, and its steps in a row.
#include "layers/grouped_linear.h"

#include <algorithm>

#include "backend/poison.h"

namespace cadre {

static constexpr std::string_view kOp = "grouped_linear";

namespace layers {

using enum linear::Tensor;

namespace {

bool has_words(Accumulate accumulate) {
  return accumulate == Accumulate::kDevice || accumulate == Accumulate::kPerExpert;
}

Operand weights(const GroupedLinearProblem& p, const LinearParameters& own) {
  if (!p.parameters.discrete_weight) return {.codes = own.w};
  return {.codes = weight_layout(p, p.parameters.weight), .discrete = own.discrete_w};
}

Operand bias(const GroupedLinearProblem& p, const LinearParameters& own) {
  if (!p.parameters.discrete_bias) return {.codes = own.bias};
  return {.codes = view(nullptr, p.parameters.bias, {p.experts, p.n}),
          .discrete = own.discrete_bias};
}

Target weight_gradients(const GroupedLinearProblem& p, const LinearParameters& own) {
  const int32_t* words = has_words(p.options.accumulate) ? own.accumulate : nullptr;
  if (!p.parameters.discrete_dw) return {.view = own.dw, .accumulate = words};
  return {weight_layout(p, p.parameters.dw), own.discrete_dw, words};
}

Target bias_gradients(const GroupedLinearProblem& p, const LinearParameters& own) {
  const int32_t* words = has_words(p.options.accumulate_bias) ? own.accumulate_bias : nullptr;
  if (!p.parameters.discrete_bias) return {.view = own.dbias, .accumulate = words};
  return {.discrete = own.discrete_dbias, .accumulate = words};
}

void poison(const LinearRun& linear, void* data, int64_t bytes) {
  backend::poison(linear.plan.device, {data, bytes}, linear.stream);
}

/// The memory that the steps of a phase write first. Within backward, wgrad reads what that wrote.
void poison(const LinearRun& linear, Phase phase) {
  if (phase == Phase::kWgrad && !linear.plan.deferred) return;
  const bool forward = phase == Phase::kForward;
  const Places& places = linear.places;
  const auto copies = [&](Phase of) { return linear.plan.copies_bytes[size_t(of)]; };
  if (phase != Phase::kInputAgain)
    poison(linear, places.workspace.data,
           !linear.plan.deferred && phase == Phase::kBackward
               ? std::max(copies(phase), copies(Phase::kWgrad))
               : copies(phase));
  if (!forward && phase != Phase::kBackward) return;
  poison(linear, forward ? places.saved.data : places.pending.data,
         forward ? linear.plan.memory.saved_bytes : linear.plan.memory.pending_bytes);
}

}  // namespace

Operand LinearRun::operand(int id) const {
  if (id == kX) return {.codes = args.x};
  if (id == kTokens) return {.codes = args.tokens};
  if (id == kDy) return {.codes = args.dy};
  if (id == kW) return weights(plan.problem, args.parameters);
  if (id == kBias) return bias(plan.problem, args.parameters);
  if (is_made(id)) return as_operand(copy(id));
  if (id == kWAlongK) return as_operand(args.parameters.quantized_w);
  if (id == kDyAlongK) return as_operand(args.dy_along_k);
  return as_operand(id == kXAlongK ? args.x_along_k : args.x_along_rows);
}

Target LinearRun::target(int id) const {
  if (id == kY) return {.view = args.y};
  if (id == kZ) return {.view = args.z};
  if (id == kDx) return {.view = args.dx};
  return id == kDw ? weight_gradients(plan.problem, args.parameters)
                   : bias_gradients(plan.problem, args.parameters);
}

TensorView weight_layout(const GroupedLinearProblem& p, DType dtype) {
  if (p.parameters.weight_major == Major::kRow) return view(nullptr, dtype, {p.experts, p.n, p.k});
  return view(nullptr, dtype, {p.experts, p.n, p.k}, {p.n * p.k, 1, p.n});
}

void launch(const LinearRun& linear, Phase phase) {
  poison(linear, phase);
  launch_phase(linear, phase);
}

void launch_backward(const LinearRun& linear) {
  launch(linear, Phase::kBackward);
  launch(linear, Phase::kInputAgain);
}

void check_backward(const LinearRun& linear, Workspace workspace) {
  const GroupedLinearPlan& plan = linear.plan;
  const ops::Checks checks(kOp, plan.problem);
  check_run(checks, plan.name, workspace, plan.memory.backward_workspace_bytes);
  checks.holds(learns(plan),
               "dgrad, wgrad and dbias are no, must be yes for one of them; backward has nothing "
               "to compute");
  check_queue(checks, linear.args.queue, 1);
  check_gradients(kOp, linear);
  if (!plan.deferred || linear.args.queue != nullptr) check_wgrad(kOp, linear);
}

void defer(const LinearRun& linear) {
  if (linear.args.queue != nullptr && linear.plan.problem.wgrad)
    linear.args.queue->push(linear.plan, linear.args);
}

}  // namespace layers

void forward(const GroupedLinearPlan& plan, const GroupedLinearArgs& args, Workspace workspace,
             Stream stream) {
  const layers::LinearRun linear =
      layers::linear_run(plan, args, workspace, Phase::kForward, stream);
  layers::check_run(ops::Checks(kOp, plan.problem), plan.name, workspace,
                    plan.memory.forward_workspace_bytes);
  layers::check_forward(kOp, linear);
  layers::launch(linear, Phase::kForward);
}

void backward(const GroupedLinearPlan& plan, const GroupedLinearArgs& args, Workspace workspace,
              Stream stream) {
  const layers::LinearRun linear =
      layers::linear_run(plan, args, workspace, Phase::kBackward, stream);
  layers::check_backward(linear, workspace);
  layers::launch_backward(linear);
  plan.deferred ? layers::defer(linear) : layers::launch(linear, Phase::kWgrad);
}

void wgrad(const GroupedLinearPlan& plan, const GroupedLinearArgs& args, Workspace workspace,
           Stream stream) {
  const layers::LinearRun linear = layers::linear_run(plan, args, workspace, Phase::kWgrad, stream);
  const ops::Checks checks(kOp, plan.problem);
  layers::check_run(checks, plan.name, workspace, plan.memory.wgrad_workspace_bytes);
  checks.holds(plan.deferred && plan.problem.wgrad,
               "no weight gradient is deferred, must be one; plan with deferred=yes and wgrad=yes");
  layers::check_wgrad(kOp, linear);
  layers::launch(linear, Phase::kWgrad);
}

}  // namespace cadre
