// Running the expert MLP: fc1, activation, fc2, and back.
#include "layers/grouped_mlp.h"

#include "backend/poison.h"
#include "layers/checks.h"
#include "layers/grouped_linear.h"

namespace cadre {

static constexpr std::string_view kOp = "grouped_mlp";

namespace layers {

using enum mlp::Tensor;

namespace {

GroupedLinearArgs linear_args(const MlpRun& mlp, int part, const LinearParameters& parameters) {
  const LayerPart& own = mlp.plan.parts[size_t(part)];
  const Places& places = mlp.places;
  GroupedLinearArgs args{.offsets = mlp.args.offsets, .parameters = parameters};
  args.rng = mlp.args.rng;
  args.saved = layers::part(places.saved, own.saved_offset, own.memory.saved_bytes);
  args.pending = layers::part(places.pending, own.pending_offset, own.memory.pending_bytes);
  args.weight_cache =
      layers::part(places.weight_cache, own.weight_cache_offset, own.memory.weight_cache_bytes);
  args.refresh_weights = mlp.args.refresh_weights;
  args.queue = mlp.args.queue;
  return args;
}

GroupedLinearArgs fc1_args(const MlpRun& mlp) {
  const GroupedMlpProblem& p = mlp.plan.problem;
  GroupedLinearArgs args = linear_args(mlp, 0, mlp.args.fc1);
  args.x = mlp.args.x;
  args.tokens = mlp.args.tokens;
  if (p.gather || !p.gather_dy) args.slot_of = mlp.args.slot_of;
  if (p.dgrad || !p.scatter) args.place_of = mlp.args.place_of;
  args.x_along_k = mlp.args.x_along_k;
  args.x_along_rows = mlp.args.x_along_rows;
  const bool fused = mlp.plan.fc1.problem.activation.has_value();
  args.y = mlp.between(fused ? kH : kZ);
  if (fused) args.z = mlp.between(kZ), args.prob = mlp.args.prob;
  args.dy = mlp.between(kDz);
  if (mlp.is_made(kDzAlongK)) args.dy_along_k = mlp.copy(kDzAlongK);
  args.dx = mlp.args.dx;
  return args;
}

GroupedLinearArgs fc2_args(const MlpRun& mlp, int h) {
  GroupedLinearArgs args = linear_args(mlp, 1, mlp.args.fc2);
  args.x = mlp.between(h);
  if (mlp.is_made(kHAlongK)) args.x_along_k = mlp.copy(kHAlongK);
  args.y = mlp.args.y;
  args.dy = mlp.args.dy;
  if (mlp.plan.problem.gather_dy) args.slot_of = mlp.args.slot_of;
  if (mlp.plan.problem.scatter) args.place_of = mlp.args.place_of;
  args.dx = mlp.between(kDh);
  args.bias_scale = mlp.args.bias2_scale;
  args.dbias_scale = mlp.args.dbias2_scale;
  return args;
}

/// The tensor that fc2 reads as x: in backward h as it was kept, or computed again.
int h_of(const GroupedMlpPlan& plan, Phase phase) {
  return phase == Phase::kForward || plan.tensors[kHAgain].written < 0 ? kH : kHAgain;
}

/// The memory that the steps of a phase write first. Within backward, wgrad reads what that wrote.
void poison(const MlpRun& mlp, Phase phase) {
  if (phase == Phase::kWgrad) return;
  const int64_t bytes = mlp.layer.copies_bytes[size_t(phase)];
  backend::poison(mlp.plan.device, {mlp.places.workspace.data, bytes}, mlp.stream);
}

/// What may lie in dw of fc1 lies there.
LayerRun with_gradient(LayerRun run, const TensorView& dw) {
  run.places.gradient = dw.data;
  return run;
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
  checks.view("z", mlp.between(kZ), p.dtype, {p.rows, mlp.plan.fc1.problem.n});
}

void check_wgrad1(const MlpRun& mlp) { check_wgrad("grouped_mlp fc1", mlp.fc1); }
void check_wgrad2(const MlpRun& mlp) { check_wgrad("grouped_mlp fc2", mlp.fc2); }

}  // namespace

MlpRun::MlpRun(const GroupedMlpPlan& of, const GroupedMlpArgs& given, const LayerRun& run,
               Phase first)
    : LayerRun(with_gradient(run, given.fc1.dw)),
      plan(of),
      args(given),
      one(fc1_args(*this)),
      two(fc2_args(*this, h_of(of, first))),
      fc1(linear_run(of.fc1, one, scratch(first), first, stream)),
      fc2(linear_run(of.fc2, two, scratch(first), first, stream)) {}

TensorView MlpRun::between(int id) const {
  if (id == kZ && args.z.rank != 0) return args.z;
  if (id == kDh && (args.dh.rank != 0 || !is_made(kDh))) return args.dh;
  return is_made(id) ? places.plain(tensor(id)) : TensorView();
}

MlpRun mlp_run(const GroupedMlpPlan& plan, const GroupedMlpArgs& args, Workspace workspace,
               Phase first, Stream stream) {
  check_run(MlpChecks(kOp, plan.problem), plan.name, workspace,
            workspace_bytes(plan.memory, first));
  return MlpRun(plan, args, layer_run(plan, args, workspace, stream, first), first);
}

void launch(const MlpRun& mlp, Phase phase) {
  poison(mlp, phase);
  launch_phase(mlp, phase);
}

void launch_backward(const MlpRun& mlp) {
  launch(mlp, Phase::kBackward);
  mlp.plan.deferred ? defer(mlp) : launch(mlp, Phase::kWgrad);
}

void defer(const MlpRun& mlp) {
  defer(mlp.fc2);
  defer(mlp.fc1);
}

void check_forward(const MlpRun& mlp) {
  const GroupedMlpPlan& plan = mlp.plan;
  const MlpChecks checks(kOp, plan.problem);
  check_memories(checks, mlp);
  check_prob(checks, mlp);
  if (mlp.is_made(kZ))
    check_z(checks, mlp);
  else
    checks.absent("z", mlp.args.z, "the plan makes none; the route unfused does");
  check_forward("grouped_mlp fc1", mlp.fc1);
  check_forward("grouped_mlp fc2", mlp.fc2);
}

void check_backward(const MlpRun& mlp) {
  const GroupedMlpPlan& plan = mlp.plan;
  const GroupedMlpProblem& p = plan.problem;
  const MlpChecks checks(kOp, p);
  checks.holds(learns(plan),
               "dgrad, wgrad1, wgrad2, dbias and dprob are no, must be yes for one of them; "
               "backward has nothing to compute");
  check_memories(checks, mlp);
  check_memory(checks, "pending", mlp.places.pending, plan.memory.pending_bytes);
  check_queue(checks, mlp.args.queue, int(p.wgrad1) + int(p.wgrad2));
  // By its own name before fc2's gradient, if that lies in it.
  const bool lent = mlp.tensor(kDh).place == Place::kGradient;
  if (lent) check_wgrad1(mlp);
  check_gradients("grouped_mlp fc2", mlp.fc2);
  if (mlp.tensor(kZ).place == Place::kSaved) check_prob(checks, mlp), check_z(checks, mlp);
  checks.holds(mlp.args.dprob == nullptr || (p.prob && p.dprob),
               "dprob is given, must be null; the problem says prob=no or dprob=no");
  if (mlp.is_made(kDz) || mlp.is_made(kDzAlongK)) check_gradients("grouped_mlp fc1", mlp.fc1);
  if (p.options.deferred && mlp.args.queue == nullptr) return;
  check_wgrad2(mlp);
  if (!lent) check_wgrad1(mlp);
}

void check_wgrad(const MlpRun& mlp) {
  const GroupedMlpPlan& plan = mlp.plan;
  const MlpChecks checks(kOp, plan.problem);
  checks.holds(plan.deferred && (plan.problem.wgrad1 || plan.problem.wgrad2),
               "no weight gradient is deferred, must be one or more; plan with deferred=yes and "
               "wgrad1=yes or wgrad2=yes");
  check_memories(checks, mlp);
  check_memory(checks, "pending", mlp.args.pending, plan.memory.pending_bytes);
  check_wgrad2(mlp);
  check_wgrad1(mlp);
}

}  // namespace layers

void forward(const GroupedMlpPlan& plan, const GroupedMlpArgs& args, Workspace workspace,
             Stream stream) {
  const auto mlp = layers::mlp_run(plan, args, workspace, Phase::kForward, stream);
  layers::check_forward(mlp);
  layers::launch(mlp, Phase::kForward);
}

void backward(const GroupedMlpPlan& plan, const GroupedMlpArgs& args, Workspace workspace,
              Stream stream) {
  const auto mlp = layers::mlp_run(plan, args, workspace, Phase::kBackward, stream);
  layers::check_backward(mlp);
  layers::launch_backward(mlp);
}

void wgrad(const GroupedMlpPlan& plan, const GroupedMlpArgs& args, Workspace workspace,
           Stream stream) {
  const auto mlp = layers::mlp_run(plan, args, workspace, Phase::kWgrad, stream);
  layers::check_wgrad(mlp);
  layers::launch(mlp, Phase::kWgrad);
}

}  // namespace cadre
