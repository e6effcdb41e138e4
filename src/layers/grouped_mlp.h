#pragma once
#include "cadre/grouped_mlp.h"
#include "layers/grouped_linear.h"

// What the rows that hold an expert MLP check before they launch anything, and its run.
namespace cadre::layers {

/// The tensors of an expert MLP, as its steps number them: the caller's, then those in between.
namespace mlp {
enum Tensor : int {
  kX,
  kY,
  kDy,
  kDx,
  kProb,
  kDprob,
  kTokens,
  kSlotOf,
  kPlaceOf,
  kZ,
  kH,
  kHAgain,
  kDh,
  kDz,
  kHAlongK,
  kDzAlongK
};
}  // namespace mlp

/// One run: the tensors between the steps, and both linears with their share of every memory.
struct MlpRun : LayerRun {
  const GroupedMlpPlan& plan;
  const GroupedMlpArgs& args;
  GroupedLinearArgs one, two;
  LinearRun fc1, fc2;

  MlpRun(const GroupedMlpPlan&, const GroupedMlpArgs&, const LayerRun&, Phase first);
  MlpRun(const MlpRun&) = delete;

  /// A tensor between two steps: where the caller wants it, or the layer's own; empty if none.
  TensorView between(int id) const;

  Operand operand(int id) const { return {.codes = between(id)}; }
  Target target(int id) const { return {.view = between(id)}; }
  const float* floats(int) const { return args.prob; }
  float* written_floats(int) const { return args.dprob; }
  const Offsets& offsets() const { return args.offsets; }
  const uint64_t* rng() const { return args.rng; }
  bool skips(const LayerStep&) const { return false; }
  void launch_part(const PartPhase& of) const { launch(of.part == 0 ? fc1 : fc2, of.phase); }
};

/// Errors    InvalidArgument if the plan is empty or the workspace is too small.
MlpRun mlp_run(const GroupedMlpPlan&, const GroupedMlpArgs&, Workspace, Phase first,
               Stream stream = {});

/// Whether backward makes the gradient of h.
bool needs_dh(const GroupedMlpProblem&);
/// Whether it reads what is before the activation.
bool reads_z(const GroupedMlpProblem&);

/// The routes, by their planners. Fused, fc1's product computes the activation; with codes, the
/// activation quantises what it computes, where a product reads that along K, and nobody else does
/// but as it is.
/// Errors    Unsupported where nobody does.
std::string refuses_fused(const GroupedMlpProblem&, const Device&);
GroupedMlpPlan plan_fused(const GroupedMlpProblem&, const Device&);
GroupedMlpPlan plan_codes(const GroupedMlpProblem&, const Device&);
GroupedMlpPlan plan_unfused(const GroupedMlpProblem&, const Device&);
GroupedMlpPlan plan_fused_within(const GroupedMlpProblem&, const Device&);
GroupedMlpPlan plan_codes_within(const GroupedMlpProblem&, const Device&);
GroupedMlpPlan plan_unfused_within(const GroupedMlpProblem&, const Device&);

/// For a layer that holds this one: unless deferred, wgrad is the last step, dw of fc1, which the
/// holder runs when it likes, in the run of backward.
GroupedMlpPlan plan_within(const GroupedMlpProblem&, const Device&);

/// Runs a phase; nothing is checked.
void launch(const MlpRun&, Phase);

/// Runs backward and the weight gradients, or leaves these to the queue.
void launch_backward(const MlpRun&);
void defer(const MlpRun&);

void check_forward(const MlpRun&);
void check_backward(const MlpRun&);
void check_wgrad(const MlpRun&);

}  // namespace cadre::layers
