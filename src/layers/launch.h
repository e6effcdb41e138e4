#pragma once
#include "backend/expert_scales.h"
#include "layers/memory.h"

// Launching a step of a layer: its tensors become the arguments of its operation. A layer's run
// derives from LayerRun and adds what it knows of the caller's tensors, by their numbers:
//   Operand operand(int)          what a step reads
//   Target target(int)            what a step writes
//   const float* floats(int)      a factor for each row
//   float* written_floats(int)    its gradient
//   Offsets offsets(), const uint64_t* rng()
//   int32_t* words(int)           experts, offsets and maps, which LayerRun has where it makes them
//   bool skips(LayerStep)
//   void launch_part(PartPhase)   a layer within the layer
namespace cadre::layers {

/// One run of a layer: where its own tensors lie.
struct LayerRun {
  const LayerPlan& layer;
  Places places;
  Stream stream{};

  const LayerTensor& tensor(int id) const { return layer.tensors[size_t(id)]; }
  bool is_made(int id) const { return tensor(id).place != Place::kCaller; }
  QuantizedView copy(int id) const { return places.copy(tensor(id)); }
  int32_t* words(int id) const { return static_cast<int32_t*>(places.data(tensor(id))); }
  /// The workspace behind the tensors that the phase has in it.
  Workspace scratch(Phase phase) const {
    return behind(places.workspace, layer.copies_bytes[size_t(phase)]);
  }
};

/// The run of forward, backward or a deferred wgrad, by its first phase. What parts leave from
/// their backward to their wgrad lies in the workspace, unless the plan asks for `pending`.
template <class Args>
LayerRun layer_run(const LayerPlan& plan, const Args& args, Workspace workspace, Stream stream,
                   Phase first) {
  LayerRun run{plan, {workspace, args.saved, args.pending, args.weight_cache}, stream};
  if (first == Phase::kBackward && plan.memory.pending_bytes == 0)
    run.places.pending = {workspace.data, workspace.bytes};
  return run;
}

/// A tensor that a step writes.
struct Target {
  TensorView view{};
  void* const* discrete = nullptr;      ///< [E] pointers
  const int32_t* accumulate = nullptr;  ///< words that say where it is added to
};

inline bool draws(const std::optional<Format>& format) { return format && format->stochastic; }
inline bool draws(const QuantizeProblem& q) { return draws(q.along_k) || draws(q.along_rows); }

template <class Run>
QuantizeArgs arguments(const Run& run, const LayerStep& step, const QuantizePlan& plan) {
  const QuantizeProblem& q = plan.problem;
  const Operand source = run.operand(step.reads[0]);
  QuantizeArgs args;
  args.source = source.codes;
  args.discrete = source.discrete;
  if (q.gather) args.slot_of = run.words(step.reads[1]);
  if (q.kind == RowsKind::kRagged) args.offsets = run.offsets();
  if (q.along_k) args.along_k = run.copy(step.writes[0]);
  if (q.along_rows) args.along_rows = run.copy(step.writes[1]);
  if (draws(q)) args.rng = run.rng();
  return args;
}

template <class Run>
DequantizeArgs arguments(const Run& run, const LayerStep& step, const DequantizePlan& plan) {
  const Operand codes = run.operand(step.reads[0]);
  const QuantizedView numbers = run.copy(step.writes[0]);
  DequantizeArgs args{.source = {.codes = codes.codes, .scales = codes.scales},
                      .offsets = {},
                      .out = numbers.codes,
                      .block_offsets = numbers.block_offsets};
  args.source.expert_scale = const_cast<float*>(codes.expert_scale);
  if (plan.problem.source.kind == RowsKind::kRagged) args.offsets = run.offsets();
  return args;
}

/// The factors of experts in a tensor: the expert scales of a copy, or the tensor itself.
template <class Run>
const float* expert_factors(const Run& run, int id) {
  const Operand of = run.operand(id);
  return of.expert_scale != nullptr ? of.expert_scale : static_cast<const float*>(of.codes.data);
}

/// Operands that are decoded bring alpha, and the offsets of their rows if they are transformed.
template <class Run>
void take_factors(const Run& run, const LayerStep& step, GroupedGemmArgs& args) {
  args.lhs.expert_scale = args.rhs.expert_scale = nullptr;
  args.alpha = expert_factors(run, step.reads[4]);
  const int lhs = step.reads[0];
  if (run.is_made(lhs) && run.copy(lhs).block_offsets != nullptr)
    args.offsets.data = run.copy(lhs).block_offsets;
}

template <class Run>
GroupedGemmArgs arguments(const Run& run, const LayerStep& step, const GroupedGemmPlan& plan) {
  const GroupedGemmProblem& g = plan.problem;
  const Target out = run.target(step.writes[0]);
  GroupedGemmArgs args;
  args.lhs = run.operand(step.reads[0]);
  args.rhs = run.operand(step.reads[1]);
  args.offsets = run.offsets();
  args.out = out.view;
  args.discrete_out = out.discrete;
  args.accumulate = out.accumulate;
  if (g.bias) {
    const Operand bias = run.operand(step.reads[2]);
    args.bias = bias.codes;
    args.discrete_bias = bias.discrete;
  }
  if (g.bias_scale) args.bias_scale = run.floats(step.reads[3]);
  if (g.alpha) take_factors(run, step, args);
  if (g.gather != Gather::kNo) args.slot_of = run.words(step.reads[6]);
  if (g.scatter) args.place_of = run.words(step.reads[6]);
  if (!g.activation) return args;
  if (g.activation->prob) args.prob = run.floats(step.reads[5]);
  if (g.activation->keep_z) args.z = run.target(step.writes[1]).view;
  return args;
}

template <class Run>
BiasGradArgs arguments(const Run& run, const LayerStep& step, const BiasGradPlan& plan) {
  const Target dbias = run.target(step.writes[0]);
  BiasGradArgs args;
  args.dy = run.operand(step.reads[0]).codes;
  args.offsets = run.offsets();
  args.dbias = dbias.view;
  args.discrete_dbias = dbias.discrete;
  args.accumulate = dbias.accumulate;
  if (!plan.problem.bias_scale) return args;
  const Operand bias = run.operand(step.reads[1]);
  args.bias = bias.codes;
  args.discrete_bias = bias.discrete;
  args.bias_scale = run.floats(step.reads[2]);
  args.dbias_scale = run.written_floats(step.writes[1]);
  return args;
}

template <class Run>
ActivationArgs arguments(const Run& run, const LayerStep& step, const ActivationPlan& plan) {
  const int z = step.reads[0], prob = step.reads[1], dh = step.reads[2];
  const int h = step.writes[0], dz = step.writes[1], dprob = step.writes[2];
  ActivationArgs args{.z = run.operand(z).codes};
  if (prob != kNone) args.prob = run.floats(prob);
  args.offsets = run.offsets();
  if (h != kNone) args.h = run.target(h).view;
  if (plan.problem.along_k) args.along_k = run.copy(step.writes[3]);
  if (!plan.problem.backward) return args;
  args.dh = run.operand(dh).codes;
  if (dz != kNone) args.dz = run.target(dz).view;
  if (dprob != kNone) args.dprob = run.written_floats(dprob);
  return args;
}

template <class Run>
OffsetsArgs arguments(const Run& run, const LayerStep& step, const OffsetsPlan& plan) {
  OffsetsArgs args{.offsets = run.words(step.writes[0])};
  if (plan.problem.source != OffsetsSource::kRouting) {
    args.source = run.words(step.reads[0]);
    return args;
  }
  args.source = run.operand(step.reads[0]).codes.data;
  args.map = {run.words(step.writes[1]), run.words(step.writes[2])};
  args.prob = run.floats(step.reads[1]);
  args.row_prob = run.written_floats(step.writes[3]);
  return args;
}

template <class Run>
RoutingArgs arguments(const Run& run, const LayerStep& step, const RoutingPlan& plan) {
  const int second = step.reads[1];
  RoutingArgs args{.logits = run.operand(step.reads[0]).codes};
  if (plan.problem.backward) {
    args.experts = run.words(second);
    args.dprob = run.floats(step.reads[2]);
    args.dscores = run.floats(step.reads[3]);
    args.dlogits = run.target(step.writes[0]).view;
    return args;
  }
  if (second != kNone) args.expert_bias = run.floats(second);
  const auto& [experts, prob, scores, offsets, row_of, slot_of, row_prob] = step.writes;
  args.experts = run.words(experts);
  args.prob = run.written_floats(prob);
  args.scores = run.written_floats(scores);
  if (!plan.problem.map) return args;
  args.offsets = run.words(offsets);
  args.map = {run.words(row_of), run.words(slot_of)};
  if (plan.problem.row_prob) args.row_prob = run.written_floats(row_prob);
  return args;
}

template <class Run>
PermuteArgs arguments(const Run& run, const LayerStep& step, const PermutePlan& plan) {
  const PermuteProblem& p = plan.problem;
  const int fourth = step.reads[3], fifth = step.reads[4];
  PermuteArgs args{.offsets = {run.words(step.reads[1]), p.experts}};
  args.map.row_of = run.words(step.reads[2]);
  const bool makes_rows = reads_tokens(p.pass);
  const TensorView read = run.operand(step.reads[0]).codes,
                   written = run.target(step.writes[0]).view;
  args.tokens = makes_rows ? read : written;
  args.rows = makes_rows ? written : read;
  if (makes_rows) args.map.slot_of = run.words(fourth);
  if (p.addend) args.addend = written;
  if (!p.prob) return args;
  args.drow_prob = run.floats(fourth);
  if (fifth != kNone) args.drow_scale = run.floats(fifth);
  args.dprob = run.written_floats(step.writes[1]);
  return args;
}

template <class Run>
void multiply_scales(const Run& run, const LayerStep& step, const ScaleProduct& plan) {
  const int lhs = step.reads[0], rhs = step.reads[1];
  auto* product = static_cast<float*>(run.copy(step.writes[0]).codes.data);
  backend::multiply_scales(
      run.layer.device, {expert_factors(run, lhs), expert_factors(run, rhs), product, plan.experts},
      run.stream);
}

/// Launches the steps of a phase in their order, those that `run` does not skip. `run.launch_part`
/// is what becomes of a layer within the layer. The arguments of products have been checked, before
/// anything was launched, and are not checked again.
template <class Run>
void launch_phase(const Run& run, Phase phase) {
  const Workspace scratch = run.scratch(phase);
  for (const LayerStep& step : run.layer.steps) {
    if (step.phase != phase || run.skips(step)) continue;
    std::visit(
        [&](const auto& plan) {
          if constexpr (std::is_same_v<decltype(plan), const GroupedGemmPlan&>)
            run_checked(plan, arguments(run, step, plan), scratch, run.stream);
          else if constexpr (requires { plan.problem; })
            cadre::run(plan, arguments(run, step, plan), scratch, run.stream);
          else if constexpr (std::is_same_v<decltype(plan), const ScaleProduct&>)
            multiply_scales(run, step, plan);
          else
            run.launch_part(plan);
        },
        step.plan);
  }
}

}  // namespace cadre::layers
