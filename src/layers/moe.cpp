// Running the expert layer: the routing and the experts, and back.
#include "layers/moe.h"

#include <algorithm>
#include <optional>

#include "backend/poison.h"
#include "layers/checks.h"

namespace cadre {

static constexpr std::string_view kOp = "moe";

namespace layers {
namespace {

using enum moe::Tensor;

/// One run: the tensors between the steps, and the experts with their share of every memory.
struct MoeRun : LayerRun {
  const MoePlan& plan;
  const MoeArgs& args;
  GroupedMlpArgs inner, shared_inner;
  MlpRun mlp;
  std::optional<MlpRun> shared;

  MoeRun(const MoePlan&, const MoeArgs&, const LayerRun&, Phase first);
  MoeRun(const MoeRun&) = delete;

  TensorView view(int id) const;
  Operand operand(int id) const { return {.codes = view(id)}; }
  Target target(int id) const { return {.view = view(id)}; }
  const float* floats(int id) const;
  float* written_floats(int id) const;
  int32_t* words(int id) const;
  Offsets offsets() const { return {words(kOffsets), plan.problem.experts}; }
  const uint64_t* rng() const { return args.rng; }
  bool skips(const LayerStep&) const { return false; }
  /// Of the shared expert all of backward, of the others what comes before their dw of fc1.
  void launch_part(const PartPhase& of) const {
    if (of.part == 0) return launch(mlp, of.phase);
    of.phase == Phase::kBackward ? launch_backward(*shared) : launch(*shared, of.phase);
  }
};

using MoeChecks = ops::Checks<MoeProblem>;

constexpr const char* kRouted = "the problem says routed=yes";
constexpr const char* kNotRouted = "the problem says routed=no";

/// What both MLPs have of the caller, and their shares of its memories.
GroupedMlpArgs part_args(const MoeRun& run, size_t part) {
  const LayerPart& own = run.plan.parts[part];
  GroupedMlpArgs args;
  args.rng = run.args.rng;
  args.saved = layers::part(run.places.saved, own.saved_offset, own.memory.saved_bytes);
  args.pending = layers::part(run.places.pending, own.pending_offset, own.memory.pending_bytes);
  args.weight_cache =
      layers::part(run.places.weight_cache, own.weight_cache_offset, own.memory.weight_cache_bytes);
  args.refresh_weights = run.args.refresh_weights;
  args.queue = run.args.queue;
  return args;
}

GroupedMlpArgs mlp_args(const MoeRun& run, Phase first) {
  const bool again = first != Phase::kForward && run.is_made(kRowsAgain);
  GroupedMlpArgs args = part_args(run, 0);
  args.offsets = run.offsets();
  args.fc1 = run.args.fc1;
  args.fc2 = run.args.fc2;
  args.x = run.view(again ? kRowsAgain : kRows);
  const GroupedMlpProblem& mlp = run.plan.mlp.problem;
  if (mlp.gather) {
    args.tokens = run.args.x;
    args.slot_of = run.words(kSlotOf);
  }
  args.prob = run.floats(kRowProb);
  if (run.plan.problem.bias2) args.bias2_scale = args.prob;
  args.y = run.view(kY);
  args.dy = mlp.gather_dy ? run.args.dout : run.view(kDy);
  args.dx = run.view(kDrows);
  args.dprob = run.written_floats(kDrowProb);
  args.dbias2_scale = run.written_floats(kDrowScale);
  return args;
}

GroupedMlpArgs shared_args(const MoeRun& run) {
  GroupedMlpArgs args = part_args(run, 1);
  args.offsets = {run.words(kSharedOffsets), 1};
  args.fc1 = run.args.shared_fc1;
  args.fc2 = run.args.shared_fc2;
  args.x = run.args.x;
  args.prob = run.args.shared_gate;
  args.y = run.args.out;
  args.dy = run.args.dout;
  args.dx = run.args.dx;
  args.dprob = run.args.dshared_gate;
  return args;
}

MoeRun::MoeRun(const MoePlan& of, const MoeArgs& given, const LayerRun& run, Phase first)
    : LayerRun(run),
      plan(of),
      args(given),
      inner(mlp_args(*this, first)),
      mlp(mlp_run(of.mlp, inner, scratch(first), first, stream)) {
  if (!has_shared(of.problem)) return;
  shared_inner = shared_args(*this);
  shared.emplace(of.shared, shared_inner,
                 layer_run(of.shared, shared_inner, scratch(first), stream, first), first);
}

TensorView MoeRun::view(int id) const {
  switch (id) {
    case kLogits:
      return args.logits;
    case kChoice:
      return cadre::view(const_cast<void*>(args.choice), plan.problem.index,
                         {rows_of(plan.problem)});
    case kX:
      return args.x;
    case kOut:
      return args.out;
    case kDout:
      return args.dout;
    case kDx:
      return args.dx;
    case kDlogits:
      return args.dlogits;
    default:
      return is_made(id) ? places.plain(tensor(id)) : TensorView();
  }
}

const float* MoeRun::floats(int id) const {
  if (id == kExpertBias) return args.expert_bias;
  if (id == kChoiceProb) return args.choice_prob;
  return id == kDscores ? args.dscores : written_floats(id);
}

float* MoeRun::written_floats(int id) const {
  if (id == kScores) return args.scores;
  if (id == kDchoiceProb) return args.dchoice_prob;
  if (id == kProb && args.prob != nullptr) return args.prob;
  return static_cast<float*>(places.data(tensor(id)));
}

int32_t* MoeRun::words(int id) const {
  if (id == kExperts) return args.experts;
  if (id == kOffsets) return args.offsets;
  if (id == kLastOffset) return args.offsets + plan.problem.experts;
  return LayerRun::words(id);
}

/// Errors    InvalidArgument if the plan is empty or has no such phase, or a memory is too small.
MoeRun moe_run(const MoePlan& plan, const MoeArgs& args, Workspace workspace, Phase first,
               Stream stream) {
  const MoeChecks checks(kOp, plan.problem);
  check_run(checks, plan.name, workspace, workspace_bytes(plan.memory, first));
  const bool defers = plan.deferred && (plan.problem.wgrad1 || plan.problem.wgrad2);
  checks.holds(first != Phase::kWgrad || defers,
               "no weight gradient is deferred, must be one or more; plan with deferred=yes and "
               "wgrad1=yes or wgrad2=yes");
  check_memory(checks, "saved", args.saved, plan.memory.saved_bytes);
  check_memory(checks, "weight_cache", args.weight_cache, plan.memory.weight_cache_bytes);
  if (first != Phase::kForward)
    check_memory(checks, "pending", args.pending, plan.memory.pending_bytes);
  return MoeRun(plan, args, layer_run(plan, args, workspace, stream, first), first);
}

/// What forward makes of the routing, and the others read.
void check_routing(const MoeChecks& checks, const MoeArgs& args, Phase phase) {
  const MoeProblem& p = checks.problem();
  const bool reads = phase == Phase::kForward || (phase == Phase::kBackward && p.dlogits);
  if (p.routed)
    checks.absent("experts", args.experts, kRouted);
  else if (reads)
    checks.present("experts", args.experts, rows_of(p), "forward writes it");
  checks.present("offsets", args.offsets, int64_t(p.experts) + 1, "forward writes it");
}

/// Backward reads it too, and writes its gradient.
void check_shared_gate(const MoeChecks& checks, const MoeArgs& args, Phase phase) {
  const MoeProblem& p = checks.problem();
  if (p.shared_gate)
    checks.present("shared_gate", args.shared_gate, p.tokens, "the problem says shared_gate=yes");
  else
    checks.absent("shared_gate", args.shared_gate, "the problem says shared_gate=no");
  if (phase == Phase::kForward) return;
  if (p.shared_gate && p.dlogits)
    checks.present("dshared_gate", args.dshared_gate, p.tokens, "the problem says dlogits=yes");
  else
    checks.absent("dshared_gate", args.dshared_gate,
                  "the problem says shared_gate=no or dlogits=no");
}

/// What forward routes by.
void check_choice(const MoeChecks& checks, const MoeArgs& args) {
  const MoeProblem& p = checks.problem();
  if (p.routed) {
    checks.present("choice", static_cast<const char*>(args.choice), rows_of(p), kRouted);
    checks.aligned("choice", args.choice, bits(p.index) / 8);
    checks.present("choice_prob", args.choice_prob, rows_of(p), kRouted);
    checks.absent("logits", args.logits.data, kRouted);
    checks.absent("scores", args.scores, kRouted);
    checks.absent("prob", args.prob, kRouted);
  } else {
    checks.absent("choice", args.choice, kNotRouted);
    checks.absent("choice_prob", args.choice_prob, kNotRouted);
    checks.view("logits", args.logits, p.logits, {p.tokens, p.experts});
  }
  if (p.expert_bias)
    checks.present("expert_bias", args.expert_bias, p.experts, "the problem says expert_bias=yes");
  else
    checks.absent("expert_bias", args.expert_bias, "the problem says expert_bias=no");
}

void check_forward(const MoeRun& run) {
  const MoeProblem& p = run.plan.problem;
  const MoeArgs& args = run.args;
  const MoeChecks checks(kOp, p);
  check_choice(checks, args);
  checks.view("x", args.x, p.dtype, {p.tokens, p.hidden});
  checks.view("out", args.out, p.dtype, {p.tokens, p.hidden});
  checks.aligned("scores", args.scores, alignof(float));
  checks.aligned("prob", args.prob, alignof(float));
  check_routing(checks, args, Phase::kForward);
  check_shared_gate(checks, args, Phase::kForward);
  check_forward(run.mlp);
  if (run.shared) check_forward(*run.shared);
}

void check_logits_gradient(const MoeChecks& checks, const MoeArgs& args) {
  const MoeProblem& p = checks.problem();
  const char* why = p.routed ? kRouted : "the problem says dlogits=no";
  if (p.routed && p.dlogits)
    checks.present("dchoice_prob", args.dchoice_prob, rows_of(p), "the problem says dlogits=yes");
  else
    checks.absent("dchoice_prob", args.dchoice_prob,
                  p.routed ? "the problem says dlogits=no" : kNotRouted);
  if (p.routed || !p.dlogits) {
    checks.absent("dlogits", args.dlogits, why);
    return checks.absent("dscores", args.dscores, why);
  }
  checks.view("logits", args.logits, p.logits, {p.tokens, p.experts});
  checks.view("dlogits", args.dlogits, p.logits, {p.tokens, p.experts});
  checks.aligned("dscores", args.dscores, alignof(float));
}

bool reads_x_again(const MoeRun& run) {
  const std::vector<LayerStep>& steps = run.plan.steps;
  return std::any_of(steps.begin(), steps.end(), [&](const LayerStep& step) {
    const bool is_later =
        step.phase == Phase::kBackward || (step.phase == Phase::kWgrad && !run.plan.deferred);
    return is_later && std::find(step.reads.begin(), step.reads.end(), kX) != step.reads.end();
  });
}

void check_backward(const MoeRun& run) {
  const MoeProblem& p = run.plan.problem;
  const MoeArgs& args = run.args;
  const MoeChecks checks(kOp, p);
  checks.holds(learns(run.plan),
               "dgrad, dlogits, wgrad1, wgrad2 and dbias are no, must be yes for one of them; "
               "backward has nothing to compute");
  checks.view("dout", args.dout, p.dtype, {p.tokens, p.hidden});
  if (reads_x_again(run)) checks.view("x", args.x, p.dtype, {p.tokens, p.hidden});
  if (p.dgrad) checks.view("dx", args.dx, p.dtype, {p.tokens, p.hidden});
  check_logits_gradient(checks, args);
  check_routing(checks, args, Phase::kBackward);
  check_shared_gate(checks, args, Phase::kBackward);
  if (run.shared) check_room(checks, args.queue, 2 * (int(p.wgrad1) + int(p.wgrad2)));
  check_backward(run.mlp);
  if (run.shared && learns(run.plan.shared)) check_backward(*run.shared);
}

/// Within backward, wgrad reads what that wrote.
void launch(const MoeRun& run, Phase phase) {
  const int64_t bytes = run.layer.copies_bytes[size_t(phase)];
  if (phase != Phase::kWgrad || run.plan.deferred)
    backend::poison(run.plan.device, {run.places.workspace.data, bytes}, run.stream);
  launch_phase(run, phase);
}

void launch_backward(const MoeRun& run) {
  launch(run, Phase::kBackward);
  run.plan.deferred ? defer(run.mlp) : launch(run, Phase::kWgrad);
}

}  // namespace
}  // namespace layers

void forward(const MoePlan& plan, const MoeArgs& args, Workspace workspace, Stream stream) {
  const auto run = layers::moe_run(plan, args, workspace, Phase::kForward, stream);
  check_forward(run);
  launch(run, Phase::kForward);
}

void backward(const MoePlan& plan, const MoeArgs& args, Workspace workspace, Stream stream) {
  const auto run = layers::moe_run(plan, args, workspace, Phase::kBackward, stream);
  check_backward(run);
  launch_backward(run);
}

void wgrad(const MoePlan& plan, const MoeArgs& args, Workspace workspace, Stream stream) {
  const auto run = layers::moe_run(plan, args, workspace, Phase::kWgrad, stream);
  layers::check_routing({kOp, plan.problem}, args, Phase::kWgrad);
  layers::check_wgrad(run.mlp);
  if (run.shared) layers::check_wgrad(*run.shared);
  launch(run, Phase::kWgrad);
}

}  // namespace cadre
