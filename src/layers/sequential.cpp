// Running a row of operations, and back.
#include "cadre/sequential.h"

#include "backend/poison.h"
#include "layers/checks.h"
#include "layers/grouped_linear.h"
#include "layers/grouped_mlp.h"

namespace cadre {
namespace layers {
namespace {

constexpr std::string_view kOp = "sequential";
constexpr std::string_view kOutput = "output", kGradInput = "grad_input";
using RowChecks = ops::Checks<SequentialProblem>;

/// One run of a row.
struct RowRun {
  const SequentialPlan& plan;
  const SequentialArgs& args;
  Places places;
  int64_t copies_bytes;  ///< of the workspace, before the scratch of the steps

  int last() const { return int(plan.steps.size()) - 1; }
  const RowStep& step(int i) const { return plan.steps[size_t(i)]; }
  Workspace scratch() const { return behind(places.workspace, copies_bytes); }

  /// The caller's buffer for one op; empty if there is none.
  TensorView op_argument(int op, std::string_view key) const {
    const int ops = int(plan.problem.ops.size());
    for (const OpArgument& given : args.op_arguments)
      if ((given.op < 0 ? given.op + ops : given.op) == op && given.key == key) return given.value;
    return {};
  }

  TensorView output(int i) const {
    const TensorView given = op_argument(step(i).first_op + step(i).ops - 1, kOutput);
    if (given.rank != 0) return given;
    return i == last() ? args.y : places.tensor(step(i).output, {});
  }
  TensorView input(int i) const { return i == 0 ? args.x : output(i - 1); }

  TensorView grad_input(int i) const {
    const TensorView given = op_argument(step(i).first_op, kGradInput);
    if (given.rank != 0) return given;
    return i == 0 ? args.dx : places.tensor(step(i).grad_input, {});
  }
  TensorView grad_output(int i) const { return i == last() ? args.dy : grad_input(i + 1); }

  const float* extra(int i) const { return args.extra_inputs[size_t(i)]; }
  float* extra_gradient(int i) const {
    return args.extra_gradients.empty() ? nullptr : args.extra_gradients[size_t(i)];
  }
};

/// What all layers of a row take alike.
template <class Args>
Args shared_args(const RowRun& row, int i, const LayerMemory& own) {
  const RowStep& step = row.step(i);
  Args args;
  args.offsets = row.args.offsets;
  args.x = row.input(i);
  args.y = row.output(i);
  args.dy = row.grad_output(i);
  args.dx = row.grad_input(i);
  args.rng = row.args.rng;
  args.saved = part(row.args.saved, step.saved_offset, own.saved_bytes);
  args.pending = part(row.args.pending, step.pending_offset, own.pending_bytes);
  args.weight_cache = part(row.args.weight_cache, step.weight_cache_offset, own.weight_cache_bytes);
  args.refresh_weights = row.args.refresh_weights;
  return args;
}

GroupedLinearArgs args_of(const GroupedLinearPlan& plan, const RowRun& row, int i) {
  const RowStep& step = row.step(i);
  auto args = shared_args<GroupedLinearArgs>(row, i, plan.memory);
  args.parameters = row.args.parameters[size_t(step.first_parameters)];
  if (plan.problem.deferred) args.queue = row.args.queue;
  if (plan.problem.bias_scale) {
    args.bias_scale = row.extra(step.first_extra);
    args.dbias_scale = row.extra_gradient(step.first_extra);
  }
  return args;
}

GroupedMlpArgs args_of(const GroupedMlpPlan& plan, const RowRun& row, int i) {
  const RowStep& step = row.step(i);
  auto args = shared_args<GroupedMlpArgs>(row, i, plan.memory);
  args.fc1 = row.args.parameters[size_t(step.first_parameters)];
  args.fc2 = row.args.parameters[size_t(step.first_parameters) + 1];
  if (plan.problem.deferred) args.queue = row.args.queue;
  args.z = row.op_argument(step.first_op, kOutput);
  args.dh = row.op_argument(step.first_op + 2, kGradInput);
  if (plan.problem.prob) {
    args.prob = row.extra(step.first_extra);
    args.dprob = row.extra_gradient(step.first_extra);
  }
  if (plan.problem.bias2_scale) {
    args.bias2_scale = row.extra(step.first_extra + plan.problem.prob);
    args.dbias2_scale = row.extra_gradient(step.first_extra + plan.problem.prob);
  }
  return args;
}

ActivationArgs args_of(const ActivationStep& plan, const RowRun& row, int i) {
  ActivationArgs args{.z = row.input(i), .offsets = row.args.offsets};
  if (plan.forward.problem.prob) args.prob = row.extra(row.step(i).first_extra);
  return args;
}

/// One step of a row, as the visitors see it.
struct At {
  const RowRun& row;
  int i;
  Stream stream{};
};

struct Forward : At {
  template <class LayerPlan>
  void operator()(const LayerPlan& plan) const {
    forward(plan, args_of(plan, row, i), row.scratch(), stream);
  }
  void operator()(const ActivationStep& plan) const {
    ActivationArgs args = args_of(plan, row, i);
    args.h = row.output(i);
    run(plan.forward, args, row.scratch(), stream);
  }
};

struct Backward : At {
  template <class LayerPlan>
  void operator()(const LayerPlan& plan) const {
    backward(plan, args_of(plan, row, i), row.scratch(), stream);
  }
  void operator()(const ActivationStep& plan) const {
    ActivationArgs args = args_of(plan, row, i);
    args.dh = row.grad_output(i);
    args.dz = row.grad_input(i);
    if (plan.backward.problem.prob) args.dprob = row.extra_gradient(row.step(i).first_extra);
    run(plan.backward, args, row.scratch(), stream);
  }
};

bool defers(const GroupedLinearPlan& plan) { return plan.problem.deferred && plan.wgrad; }
bool defers(const GroupedMlpPlan& plan) {
  return plan.problem.deferred && (plan.fc1.wgrad || plan.fc2.wgrad);
}

struct Wgrad : At {
  template <class LayerPlan>
  void operator()(const LayerPlan& plan) const {
    if (defers(plan)) wgrad(plan, args_of(plan, row, i), row.scratch(), stream);
  }
  void operator()(const ActivationStep&) const {}
};

struct CheckForward : At {
  void operator()(const GroupedLinearPlan& plan) const {
    const GroupedLinearArgs args = args_of(plan, row, i);
    check_forward(kOp, LinearRun{plan, args, row.scratch()});
  }
  void operator()(const GroupedMlpPlan& plan) const {
    check_forward(plan, args_of(plan, row, i), row.scratch());
  }
  void operator()(const ActivationStep& plan) const {
    const ActivationProblem& p = plan.forward.problem;
    const ops::Checks checks(kOp, p);
    const int64_t columns = info(p.kind).gated ? 2 * p.features : p.features;
    checks.offsets(row.args.offsets, p.experts);
    checks.view("input of an activation", row.input(i), p.z, {p.rows, columns});
    checks.view("output of an activation", row.output(i), p.h, {p.rows, p.features});
  }
};

struct CheckBackward : At {
  void operator()(const GroupedLinearPlan& plan) const {
    check_backward(plan, args_of(plan, row, i), row.scratch());
  }
  void operator()(const GroupedMlpPlan& plan) const {
    check_backward(plan, args_of(plan, row, i), row.scratch());
  }
  void operator()(const ActivationStep& plan) const {
    const ActivationProblem& p = plan.forward.problem;
    const ops::Checks checks(kOp, p);
    const int64_t columns = info(p.kind).gated ? 2 * p.features : p.features;
    checks.offsets(row.args.offsets, p.experts);
    checks.view("input of an activation", row.input(i), p.z, {p.rows, columns});
    checks.view("gradient of an activation's output", row.grad_output(i), p.h,
                {p.rows, p.features});
    checks.view("gradient of an activation's input", row.grad_input(i), p.z, {p.rows, columns});
  }
};

struct CheckWgrad : At {
  void operator()(const GroupedLinearPlan& plan) const {
    const GroupedLinearArgs args = args_of(plan, row, i);
    if (defers(plan)) check_wgrad(kOp, LinearRun{plan, args, row.scratch()});
  }
  void operator()(const GroupedMlpPlan& plan) const {
    if (defers(plan)) check_wgrad(plan, args_of(plan, row, i), row.scratch());
  }
  void operator()(const ActivationStep&) const {}
};

int tasks_of(const GroupedLinearPlan& plan) { return defers(plan) ? 1 : 0; }
int tasks_of(const GroupedMlpPlan& plan) {
  return defers(plan) ? int(plan.problem.wgrad1) + int(plan.problem.wgrad2) : 0;
}
int tasks_of(const ActivationStep&) { return 0; }

int tasks_of(const SequentialPlan& plan) {
  int tasks = 0;
  for (size_t i = size_t(plan.backward_stop); i < plan.steps.size(); ++i)
    tasks += std::visit([](const auto& own) { return tasks_of(own); }, plan.steps[i].plan);
  return tasks;
}

void check_op_argument(const RowChecks& checks, const RowRun& row, size_t i) {
  const OpArgument& given = row.args.op_arguments[i];
  const int ops = int(row.plan.problem.ops.size());
  checks.holds(given.op >= -ops && given.op < ops, "op of op_arguments[", i, "] is ", given.op,
               ", must be ", -ops, " to ", ops - 1, "; the row has ", ops, " ops");
  checks.holds(given.key == kOutput || given.key == kGradInput, "key of op_arguments[", i, "] is '",
               given.key, "', must be output or grad_input");
  const int op = given.op < 0 ? given.op + ops : given.op;
  checks.holds(std::holds_alternative<GroupedLinearProblem>(row.plan.problem.ops[size_t(op)]),
               "key of op_arguments[", i, "] is '", given.key, "', must not be given to op ", op,
               "; an activation takes no arguments");
  checks.holds(given.value.rank != 0, "value of op_arguments[", i, "] is empty, must be a tensor");
  for (size_t j = 0; j < i; ++j) {
    const OpArgument& other = row.args.op_arguments[j];
    const bool same = (other.op < 0 ? other.op + ops : other.op) == op && other.key == given.key;
    checks.holds(!same, "op_arguments[", i, "] repeats ", given.key, " of op ", op,
                 ", must be given once");
  }
}

void check_lists(const RowChecks& checks, const RowRun& row) {
  const SequentialPlan& plan = row.plan;
  const SequentialArgs& args = row.args;
  checks.holds(int(args.parameters.size()) == plan.linears, "parameters has ",
               args.parameters.size(), " entries, must be ", plan.linears,
               "; one for each grouped_linear");
  checks.holds(int(args.extra_inputs.size()) == plan.extra_inputs, "extra_inputs has ",
               args.extra_inputs.size(), " entries, must be ", plan.extra_inputs,
               "; one for each bias_scale and prob, in op order");
  const int64_t rows = std::visit([](const auto& p) { return p.rows; }, plan.problem.ops.front());
  for (size_t i = 0; i < args.extra_inputs.size(); ++i)
    checks.holds(args.extra_inputs[i] != nullptr || rows == 0, "extra_inputs[", i,
                 "] is null, must point to ", rows, " elements");
  for (size_t i = 0; i < args.op_arguments.size(); ++i) check_op_argument(checks, row, i);
  const int ops = int(plan.problem.ops.size());
  checks.holds(args.y.rank == 0 || row.op_argument(ops - 1, kOutput).rank == 0,
               "y is given, must be empty; it is the output of op ", ops - 1, " too");
  checks.holds(args.dx.rank == 0 || row.op_argument(0, kGradInput).rank == 0,
               "dx is given, must be empty; it is the grad_input of op 0 too");
}

void check_memories(const RowChecks& checks, const RowRun& row) {
  const LayerMemory& m = row.plan.memory;
  check_memory(checks, "saved", row.args.saved, m.saved_bytes);
  check_memory(checks, "pending", row.args.pending, m.pending_bytes);
  check_memory(checks, "weight_cache", row.args.weight_cache, m.weight_cache_bytes);
}

void check_extra_gradients(const RowChecks& checks, const RowRun& row) {
  const size_t given = row.args.extra_gradients.size();
  checks.holds(int(given) == row.plan.extra_inputs, "extra_gradients has ", given,
               " entries, must be ", row.plan.extra_inputs, "; one for each extra input");
  const int reached = row.step(row.plan.backward_stop).first_extra;
  for (int i = 0; i < reached; ++i)
    checks.holds(row.extra_gradient(i) == nullptr, "extra_gradients[", i,
                 "] is given, must be null; backward stops behind its op, which has dgrad=no");
}

RowRun row_run(const SequentialPlan& plan, const SequentialArgs& args, Workspace workspace,
               int64_t copies_bytes) {
  return {plan, args, {workspace, args.saved, args.pending, args.weight_cache}, copies_bytes};
}

void poison(const RowRun& row, Stream stream) {
  backend::poison(row.plan.device, {row.places.workspace.data, row.copies_bytes}, stream);
}

}  // namespace
}  // namespace layers

void forward(const SequentialPlan& plan, const SequentialArgs& args, Workspace workspace,
             Stream stream) {
  const layers::RowChecks checks(layers::kOp, plan.problem);
  layers::check_run(checks, plan.name, workspace, plan.memory.forward_workspace_bytes);
  const layers::RowRun row = layers::row_run(plan, args, workspace, plan.forward_copies_bytes);
  layers::check_lists(checks, row);
  layers::check_memory(checks, "saved", args.saved, plan.memory.saved_bytes);
  layers::check_memory(checks, "weight_cache", args.weight_cache, plan.memory.weight_cache_bytes);
  for (int i = 0; i <= row.last(); ++i)
    std::visit(layers::CheckForward{{row, i}}, row.step(i).plan);

  layers::poison(row, stream);
  for (int i = 0; i <= row.last(); ++i)
    std::visit(layers::Forward{{row, i, stream}}, row.step(i).plan);
}

void backward(const SequentialPlan& plan, const SequentialArgs& args, Workspace workspace,
              Stream stream) {
  const layers::RowChecks checks(layers::kOp, plan.problem);
  layers::check_run(checks, plan.name, workspace, plan.memory.backward_workspace_bytes);
  const layers::RowRun row = layers::row_run(plan, args, workspace, plan.backward_copies_bytes);
  layers::check_lists(checks, row);
  layers::check_extra_gradients(checks, row);
  layers::check_memories(checks, row);
  const int tasks = layers::tasks_of(plan);
  checks.holds(args.queue == nullptr || tasks > 0,
               "queue is given, must be null; no op of the row is deferred");
  layers::check_room(checks, args.queue, tasks);
  for (int i = row.last(); i >= plan.backward_stop; --i)
    std::visit(layers::CheckBackward{{row, i}}, row.step(i).plan);

  layers::poison(row, stream);
  for (int i = row.last(); i >= plan.backward_stop; --i)
    std::visit(layers::Backward{{row, i, stream}}, row.step(i).plan);
}

void wgrad(const SequentialPlan& plan, const SequentialArgs& args, Workspace workspace,
           Stream stream) {
  const layers::RowChecks checks(layers::kOp, plan.problem);
  layers::check_run(checks, plan.name, workspace, plan.memory.wgrad_workspace_bytes);
  checks.holds(layers::tasks_of(plan) > 0,
               "no op of the row is deferred, must be one or more; plan with deferred=yes");
  const layers::RowRun row = layers::row_run(plan, args, workspace, 0);
  layers::check_lists(checks, row);
  layers::check_memories(checks, row);
  for (int i = row.last(); i >= plan.backward_stop; --i)
    std::visit(layers::CheckWgrad{{row, i}}, row.step(i).plan);

  for (int i = row.last(); i >= plan.backward_stop; --i)
    std::visit(layers::Wgrad{{row, i, stream}}, row.step(i).plan);
}

}  // namespace cadre
