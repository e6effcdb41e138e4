// Running the expert MLP: fc1, activation, fc2, and back.
#include "layers/grouped_mlp.h"

#include "backend/poison.h"
#include "layers/checks.h"
#include "layers/grouped_linear.h"

namespace cadre {

static constexpr std::string_view kOp = "grouped_mlp";

namespace layers {
namespace {

/// What the layer adds to the caller's arguments: where the tensors between its steps lie.
struct MlpRun {
  const GroupedMlpPlan& plan;
  const GroupedMlpArgs& args;
  Places places;
  Stream stream;
  int64_t copies_bytes;  ///< of the workspace, before the scratch of the steps

  Workspace scratch() const { return behind(places.workspace, copies_bytes); }

  TensorView z() const { return args.z.rank != 0 ? args.z : places.tensor(plan.z, {}); }
  TensorView dh() const {
    return args.dh.rank != 0 || !plan.activation_backward ? args.dh : places.tensor(plan.dh, {});
  }
  TensorView dz() const {
    return plan.activation_backward ? places.tensor(plan.dz, {}) : TensorView();
  }
};

MlpRun forward_run(const GroupedMlpPlan& plan, const GroupedMlpArgs& args, Workspace workspace,
                   Stream stream) {
  return {plan,
          args,
          {workspace, args.saved, args.pending, args.weight_cache},
          stream,
          plan.forward_copies_bytes};
}

/// Backward keeps what wgrad reads at the start of its workspace, unless it is deferred.
MlpRun backward_run(const GroupedMlpPlan& plan, const GroupedMlpArgs& args, Workspace workspace,
                    Stream stream) {
  MlpRun run = forward_run(plan, args, workspace, stream);
  run.copies_bytes = plan.backward_copies_bytes;
  if (plan.problem.deferred) return run;
  run.places.pending = {workspace.data, plan.pending_bytes};
  run.places.workspace = behind(workspace, plan.pending_bytes);
  return run;
}

GroupedLinearArgs linear_args(const MlpRun& mlp, const LinearParameters& parameters) {
  GroupedLinearArgs args{.offsets = mlp.args.offsets, .parameters = parameters};
  args.rng = mlp.args.rng;
  args.refresh_weights = mlp.args.refresh_weights;
  args.queue = mlp.args.queue;
  return args;
}

GroupedLinearArgs fc1_args(const MlpRun& mlp) {
  const LayerMemory& own = mlp.plan.fc1.memory;
  GroupedLinearArgs args = linear_args(mlp, mlp.args.fc1);
  args.x = mlp.args.x;
  args.y = mlp.z();
  args.dy = mlp.dz();
  args.dx = mlp.args.dx;
  args.saved = part(mlp.places.saved, 0, own.saved_bytes);
  args.pending = part(mlp.places.pending, 0, own.pending_bytes);
  args.weight_cache = part(mlp.places.weight_cache, 0, own.weight_cache_bytes);
  return args;
}

GroupedLinearArgs fc2_args(const MlpRun& mlp, const OperandPlan& h) {
  const LayerMemory &before = mlp.plan.fc1.memory, &own = mlp.plan.fc2.memory;
  GroupedLinearArgs args = linear_args(mlp, mlp.args.fc2);
  args.x = mlp.places.tensor(h, {});
  args.y = mlp.args.y;
  args.dy = mlp.args.dy;
  args.dx = mlp.dh();
  args.bias_scale = mlp.args.bias2_scale;
  args.dbias_scale = mlp.args.dbias2_scale;
  args.saved = part(mlp.places.saved, aligned(before.saved_bytes), own.saved_bytes);
  args.pending = part(mlp.places.pending, aligned(before.pending_bytes), own.pending_bytes);
  args.weight_cache =
      part(mlp.places.weight_cache, aligned(before.weight_cache_bytes), own.weight_cache_bytes);
  return args;
}

ActivationArgs activation_args(const MlpRun& mlp, const OperandPlan& h) {
  ActivationArgs args{.z = mlp.z(), .prob = mlp.args.prob, .offsets = mlp.args.offsets};
  args.h = mlp.places.tensor(h, {});
  return args;
}

ActivationArgs activation_backward_args(const MlpRun& mlp) {
  const GroupedMlpProblem& p = mlp.plan.problem;
  ActivationArgs args = activation_args(mlp, mlp.plan.h_again);
  if (!p.wgrad2 || p.keep_h) args.h = {};
  args.dh = mlp.dh();
  args.dz = mlp.dz();
  if (p.prob && p.dprob) args.dprob = mlp.args.dprob;
  return args;
}

void poison(const MlpRun& mlp) {
  backend::poison(mlp.plan.device, {mlp.places.workspace.data, mlp.copies_bytes}, mlp.stream);
}

using MlpChecks = ops::Checks<GroupedMlpProblem>;

void check_memories(const MlpChecks& checks, const MlpRun& mlp) {
  check_memory(checks, "saved", mlp.places.saved, mlp.plan.memory.saved_bytes);
  check_memory(checks, "weight_cache", mlp.places.weight_cache, mlp.plan.memory.weight_cache_bytes);
}

void check_prob(const MlpChecks& checks, const MlpRun& mlp) {
  const GroupedMlpProblem& p = mlp.plan.problem;
  if (p.prob) {
    checks.present("prob", mlp.args.prob, p.rows, "the problem says prob=yes");
  } else {
    checks.absent("prob", mlp.args.prob, "the problem says prob=no");
  }
}

void check_z(const MlpChecks& checks, const MlpRun& mlp) {
  const GroupedMlpProblem& p = mlp.plan.problem;
  checks.view("z", mlp.z(), p.dtype, {p.rows, mlp.plan.fc1.problem.n});
}

/// Both linears of a run, each with its share of every memory.
struct Linears {
  GroupedLinearArgs one, two;
  LinearRun fc1, fc2;

  Linears(const MlpRun& mlp, const OperandPlan& h)
      : one(fc1_args(mlp)),
        two(fc2_args(mlp, h)),
        fc1{mlp.plan.fc1, one, mlp.scratch(), mlp.stream},
        fc2{mlp.plan.fc2, two, mlp.scratch(), mlp.stream} {}
  Linears(const Linears&) = delete;
};

MlpRun wgrad_run(const GroupedMlpPlan& plan, const GroupedMlpArgs& args, Workspace workspace,
                 Stream stream) {
  MlpRun run = forward_run(plan, args, workspace, stream);
  run.copies_bytes = 0;
  return run;
}

void check_wgrads(const Linears& linears) {
  check_wgrad("grouped_mlp fc2", linears.fc2);
  check_wgrad("grouped_mlp fc1", linears.fc1);
}

}  // namespace

void check_forward(const GroupedMlpPlan& plan, const GroupedMlpArgs& args, Workspace workspace) {
  const MlpChecks checks(kOp, plan.problem);
  check_run(checks, plan.name, workspace, plan.memory.forward_workspace_bytes);
  const MlpRun mlp = forward_run(plan, args, workspace, {});
  const Linears linears(mlp, plan.h);
  check_memories(checks, mlp);
  check_prob(checks, mlp);
  check_z(checks, mlp);
  check_forward("grouped_mlp fc1", linears.fc1);
  check_forward("grouped_mlp fc2", linears.fc2);
}

void check_backward(const GroupedMlpPlan& plan, const GroupedMlpArgs& args, Workspace workspace) {
  const GroupedMlpProblem& p = plan.problem;
  const MlpChecks checks(kOp, p);
  check_run(checks, plan.name, workspace, plan.memory.backward_workspace_bytes);
  checks.holds(plan.activation_backward || plan.fc2.wgrad || plan.fc2.bias_grad,
               "dgrad, wgrad1, wgrad2, dbias and dprob are no, must be yes for one of them; "
               "backward has nothing to compute");
  const MlpRun mlp = backward_run(plan, args, workspace, {});
  const Linears linears(mlp, plan.h_again);
  check_memories(checks, mlp);
  check_memory(checks, "pending", mlp.places.pending, plan.pending_bytes);
  check_queue(checks, args.queue, int(p.wgrad1) + int(p.wgrad2));
  check_gradients("grouped_mlp fc2", linears.fc2);
  if (plan.activation_backward || plan.recompute) check_prob(checks, mlp), check_z(checks, mlp);
  checks.holds(args.dprob == nullptr || (p.prob && p.dprob),
               "dprob is given, must be null; the problem says prob=no or dprob=no");
  if (plan.activation_backward) check_gradients("grouped_mlp fc1", linears.fc1);
  if (!p.deferred || args.queue != nullptr) check_wgrads(linears);
}

void check_wgrad(const GroupedMlpPlan& plan, const GroupedMlpArgs& args, Workspace workspace) {
  const MlpChecks checks(kOp, plan.problem);
  check_run(checks, plan.name, workspace, plan.memory.wgrad_workspace_bytes);
  checks.holds(plan.problem.deferred && (plan.fc1.wgrad || plan.fc2.wgrad),
               "no weight gradient is deferred, must be one or more; plan with deferred=yes and "
               "wgrad1=yes or wgrad2=yes");
  const MlpRun mlp = wgrad_run(plan, args, workspace, {});
  check_memories(checks, mlp);
  check_memory(checks, "pending", args.pending, plan.pending_bytes);
  check_wgrads(Linears(mlp, plan.h_again));
}

}  // namespace layers

void forward(const GroupedMlpPlan& plan, const GroupedMlpArgs& args, Workspace workspace,
             Stream stream) {
  layers::check_forward(plan, args, workspace);
  const layers::MlpRun mlp = layers::forward_run(plan, args, workspace, stream);
  const layers::Linears linears(mlp, plan.h);

  layers::poison(mlp);
  layers::multiply(linears.fc1);
  run(plan.activation, layers::activation_args(mlp, plan.h), mlp.scratch(), stream);
  layers::multiply(linears.fc2);
}

void backward(const GroupedMlpPlan& plan, const GroupedMlpArgs& args, Workspace workspace,
              Stream stream) {
  layers::check_backward(plan, args, workspace);
  const layers::MlpRun mlp = layers::backward_run(plan, args, workspace, stream);
  const layers::Linears linears(mlp, plan.h_again);

  layers::poison(mlp);
  layers::gradients(linears.fc2);
  if (plan.activation_backward)
    run(*plan.activation_backward, layers::activation_backward_args(mlp), mlp.scratch(), stream);
  if (plan.recompute)
    run(*plan.recompute, layers::activation_args(mlp, plan.h_again), mlp.scratch(), stream);
  layers::keep_input(linears.fc2);
  layers::gradients(linears.fc1);
  layers::keep_input(linears.fc1);
  for (const layers::LinearRun* linear : {&linears.fc2, &linears.fc1})
    plan.problem.deferred ? layers::defer(*linear) : layers::weigh(*linear);
}

void wgrad(const GroupedMlpPlan& plan, const GroupedMlpArgs& args, Workspace workspace,
           Stream stream) {
  layers::check_wgrad(plan, args, workspace);
  const layers::MlpRun mlp = layers::wgrad_run(plan, args, workspace, stream);
  const layers::Linears linears(mlp, plan.h_again);

  layers::weigh(linears.fc2);
  layers::weigh(linears.fc1);
}

}  // namespace cadre
