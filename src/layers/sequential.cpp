// Running a row of operations, and back.
#include "layers/sequential.h"

#include "backend/poison.h"

namespace cadre {
namespace layers {
namespace {

constexpr std::string_view kOp = "sequential";
constexpr std::string_view kOutput = "output", kGradInput = "grad_input";
using RowChecks = ops::Checks<SequentialProblem>;

/// One run of a row.
struct RowRun : LayerRun {
  const SequentialPlan& plan;
  const SequentialArgs& args;
  row::Tensors ids;

  int last() const { return int(plan.row.size()) - 1; }
  const RowPart& part(int i) const { return plan.row[size_t(i)]; }

  /// The caller's buffer for one op; empty if there is none.
  TensorView op_argument(int op, std::string_view key) const {
    const int ops = int(plan.problem.ops.size());
    for (const OpArgument& given : args.op_arguments)
      if ((given.op < 0 ? given.op + ops : given.op) == op && given.key == key) return given.value;
    return {};
  }

  TensorView output(int i) const {
    const TensorView given = op_argument(part(i).first_op + part(i).ops - 1, kOutput);
    if (given.rank != 0) return given;
    return i == last() ? args.y : made(ids.output(i));
  }
  TensorView input(int i) const { return i == 0 ? args.x : output(i - 1); }

  TensorView grad_input(int i) const {
    const TensorView given = op_argument(part(i).first_op, kGradInput);
    if (given.rank != 0) return given;
    return i == 0 ? args.dx : made(ids.grad_input(i));
  }
  TensorView grad_output(int i) const { return i == last() ? args.dy : grad_input(i + 1); }

  const float* extra(int i) const { return args.extra_inputs[size_t(i)]; }
  float* extra_gradient(int i) const {
    return args.extra_gradients.empty() ? nullptr : args.extra_gradients[size_t(i)];
  }

  TensorView view(int id) const {
    if (id == row::Tensors::kX) return args.x;
    if (id == row::Tensors::kDy) return args.dy;
    return ids.is_grad_input(id) ? grad_input(ids.part_of(id)) : output(ids.part_of(id));
  }

  Operand operand(int id) const { return {.codes = view(id)}; }
  Target target(int id) const { return {.view = view(id)}; }
  const float* floats(int id) const { return extra(ids.number_of_extra(id)); }
  float* written_floats(int id) const { return extra_gradient(ids.number_of_extra(id)); }
  const Offsets& offsets() const { return args.offsets; }
  const uint64_t* rng() const { return args.rng; }
  bool skips(const LayerStep&) const { return false; }
  void launch_part(const PartPhase&) const;

 private:
  TensorView made(int id) const { return is_made(id) ? places.plain(tensor(id)) : TensorView(); }
};

/// What all layers of a row take alike.
template <class Args>
Args shared_args(const RowRun& row, int i) {
  const LayerPart& own = row.plan.parts[size_t(i)];
  const LayerMemory& m = own.memory;
  Args args;
  args.offsets = row.args.offsets;
  args.x = row.input(i);
  args.y = row.output(i);
  args.dy = row.grad_output(i);
  args.dx = row.grad_input(i);
  args.rng = row.args.rng;
  args.saved = part(row.args.saved, own.saved_offset, m.saved_bytes);
  args.pending = part(row.args.pending, own.pending_offset, m.pending_bytes);
  args.weight_cache = part(row.args.weight_cache, own.weight_cache_offset, m.weight_cache_bytes);
  args.refresh_weights = row.args.refresh_weights;
  return args;
}

GroupedLinearArgs args_of(const GroupedLinearPlan& plan, const RowRun& row, int i) {
  const RowPart& own = row.part(i);
  auto args = shared_args<GroupedLinearArgs>(row, i);
  args.parameters = row.args.parameters[size_t(own.first_parameters)];
  if (plan.problem.options.deferred) args.queue = row.args.queue;
  if (plan.problem.bias_scale) {
    args.bias_scale = row.extra(own.first_extra);
    args.dbias_scale = row.extra_gradient(own.first_extra);
  }
  return args;
}

GroupedMlpArgs args_of(const GroupedMlpPlan& plan, const RowRun& row, int i) {
  const RowPart& own = row.part(i);
  auto args = shared_args<GroupedMlpArgs>(row, i);
  args.fc1 = row.args.parameters[size_t(own.first_parameters)];
  args.fc2 = row.args.parameters[size_t(own.first_parameters) + 1];
  if (plan.problem.options.deferred) args.queue = row.args.queue;
  args.z = row.op_argument(own.first_op, kOutput);
  args.dh = row.op_argument(own.first_op + 2, kGradInput);
  if (plan.problem.prob) {
    args.prob = row.extra(own.first_extra);
    args.dprob = row.extra_gradient(own.first_extra);
  }
  if (plan.problem.bias2_scale) {
    args.bias2_scale = row.extra(own.first_extra + plan.problem.prob);
    args.dbias2_scale = row.extra_gradient(own.first_extra + plan.problem.prob);
  }
  return args;
}

/// Launches a phase of a layer of the row.
struct Launch {
  const RowRun& row;
  int i;
  Phase phase;

  template <class Plan>
  void operator()(const Plan& plan) const {
    const auto args = args_of(plan, row, i);
    const Workspace scratch = row.scratch(phase);
    if (phase == Phase::kForward) return forward(plan, args, scratch, row.stream);
    if (phase == Phase::kBackward) return backward(plan, args, scratch, row.stream);
    wgrad(plan, args, scratch, row.stream);
  }
  void operator()(const ActivationStep&) const {}
};

/// A part of a row, as the checks see it.
struct At {
  const RowRun& row;
  int i;
};

struct CheckForward : At {
  void operator()(const GroupedLinearPlan& plan) const {
    const GroupedLinearArgs args = args_of(plan, row, i);
    check_forward(kOp, linear_run(plan, args, row.scratch(Phase::kForward), Phase::kForward));
  }
  void operator()(const GroupedMlpPlan& plan) const {
    const GroupedMlpArgs args = args_of(plan, row, i);
    check_forward(mlp_run(plan, args, row.scratch(Phase::kForward), Phase::kForward));
  }
  void operator()(const ActivationStep& plan) const {
    const ActivationProblem& p = plan.forward.problem;
    const ops::Checks checks(kOp, p);
    const int64_t columns = z_columns(p.kind, p.features);
    checks.offsets(row.args.offsets, p.experts);
    checks.view("input of an activation", row.input(i), p.z, {p.rows, columns});
    checks.view("output of an activation", row.output(i), p.h, {p.rows, p.features});
  }
};

struct CheckBackward : At {
  void operator()(const GroupedLinearPlan& plan) const {
    const GroupedLinearArgs args = args_of(plan, row, i);
    const Workspace scratch = row.scratch(Phase::kBackward);
    check_backward(linear_run(plan, args, scratch, Phase::kBackward), scratch);
  }
  void operator()(const GroupedMlpPlan& plan) const {
    const GroupedMlpArgs args = args_of(plan, row, i);
    check_backward(mlp_run(plan, args, row.scratch(Phase::kBackward), Phase::kBackward));
  }
  void operator()(const ActivationStep& plan) const {
    const ActivationProblem& p = plan.forward.problem;
    const ops::Checks checks(kOp, p);
    const int64_t columns = z_columns(p.kind, p.features);
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
    if (row::defers(plan))
      check_wgrad(kOp, linear_run(plan, args, row.scratch(Phase::kWgrad), Phase::kWgrad));
  }
  void operator()(const GroupedMlpPlan& plan) const {
    const GroupedMlpArgs args = args_of(plan, row, i);
    if (row::defers(plan))
      check_wgrad(mlp_run(plan, args, row.scratch(Phase::kWgrad), Phase::kWgrad));
  }
  void operator()(const ActivationStep&) const {}
};

int tasks_of(const GroupedLinearPlan& plan) { return row::defers(plan) ? 1 : 0; }
int tasks_of(const GroupedMlpPlan& plan) {
  return row::defers(plan) ? int(plan.problem.wgrad1) + int(plan.problem.wgrad2) : 0;
}
int tasks_of(const ActivationStep&) { return 0; }

int tasks_of(const SequentialPlan& plan) {
  int tasks = 0;
  for (size_t i = size_t(plan.backward_stop); i < plan.row.size(); ++i)
    tasks += std::visit([](const auto& own) { return tasks_of(own); }, plan.row[i].plan);
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
  const int reached = row.part(row.plan.backward_stop).first_extra;
  for (int i = 0; i < reached; ++i)
    checks.holds(row.extra_gradient(i) == nullptr, "extra_gradients[", i,
                 "] is given, must be null; backward stops behind its op, which has dgrad=no");
}

/// Of a phase whose steps go from the first op to the last, or from the last to the first that
/// learns.
template <class Check>
void check_parts(const RowRun& row, bool forward) {
  const int stop = row.plan.backward_stop;
  if (forward)
    for (int i = 0; i <= row.last(); ++i) std::visit(Check{{row, i}}, row.part(i).plan);
  else
    for (int i = row.last(); i >= stop; --i) std::visit(Check{{row, i}}, row.part(i).plan);
}

/// Errors    InvalidArgument if the plan is empty or the workspace is too small.
RowRun row_run(const SequentialPlan& plan, const SequentialArgs& args, Workspace workspace,
               Phase first, Stream stream) {
  check_run(RowChecks(kOp, plan.problem), plan.name, workspace,
            workspace_bytes(plan.memory, first));
  return {layer_run(plan, args, workspace, stream, first), plan, args, row::Tensors(plan)};
}

void launch_row(const RowRun& row, Phase phase) {
  const int64_t bytes = row.plan.copies_bytes[size_t(phase)];
  backend::poison(row.plan.device, {row.places.workspace.data, bytes}, row.stream);
  launch_phase(row, phase);
}

}  // namespace

void RowRun::launch_part(const PartPhase& of) const {
  std::visit(Launch{*this, of.part, of.phase}, part(of.part).plan);
}

}  // namespace layers

void forward(const SequentialPlan& plan, const SequentialArgs& args, Workspace workspace,
             Stream stream) {
  const auto row = layers::row_run(plan, args, workspace, Phase::kForward, stream);
  const layers::RowChecks checks(layers::kOp, plan.problem);
  layers::check_lists(checks, row);
  layers::check_memory(checks, "saved", args.saved, plan.memory.saved_bytes);
  layers::check_memory(checks, "weight_cache", args.weight_cache, plan.memory.weight_cache_bytes);
  layers::check_parts<layers::CheckForward>(row, true);
  layers::launch_row(row, Phase::kForward);
}

void backward(const SequentialPlan& plan, const SequentialArgs& args, Workspace workspace,
              Stream stream) {
  const auto row = layers::row_run(plan, args, workspace, Phase::kBackward, stream);
  const layers::RowChecks checks(layers::kOp, plan.problem);
  layers::check_lists(checks, row);
  layers::check_extra_gradients(checks, row);
  layers::check_memories(checks, row);
  const int tasks = layers::tasks_of(plan);
  checks.holds(args.queue == nullptr || tasks > 0,
               "queue is given, must be null; no op of the row is deferred");
  layers::check_room(checks, args.queue, tasks);
  layers::check_parts<layers::CheckBackward>(row, false);
  layers::launch_row(row, Phase::kBackward);
}

void wgrad(const SequentialPlan& plan, const SequentialArgs& args, Workspace workspace,
           Stream stream) {
  const auto row = layers::row_run(plan, args, workspace, Phase::kWgrad, stream);
  const layers::RowChecks checks(layers::kOp, plan.problem);
  checks.holds(layers::tasks_of(plan) > 0,
               "no op of the row is deferred, must be one or more; plan with deferred=yes");
  layers::check_lists(checks, row);
  layers::check_memories(checks, row);
  layers::check_parts<layers::CheckWgrad>(row, false);
  layers::launch_row(row, Phase::kWgrad);
}

}  // namespace cadre
