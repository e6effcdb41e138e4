#pragma once
#include "arguments.h"
#include "expert_launch.h"
#include "moe.h"

namespace cadre::door {

/// A call's tensors as the arguments that the library takes.
class MoeLaunch : public ExpertLaunch<MoeProblem, MoeArgs> {
 public:
  MoeLaunch(const MoeCall& call, const MoeProblem& p)
      : ExpertLaunch(p, call.x), shared1_(p.parameters, tables), shared2_(p.parameters, tables) {
    fc1.bind(call.weight1, call.bias1);
    fc2.bind(call.weight2, call.bias2);
    if (call.shared1) shared1_.bind(as_expert(*call.shared1, p.parameters.discrete_weight), {});
    if (call.shared2) shared2_.bind(as_expert(*call.shared2, p.parameters.discrete_weight), {});
    gate_ = read_floats(call.shared_gate, {"shared_gate", {p.tokens}, call.x});
    args.shared_gate = floats(gate_, "shared_gate");
    args.logits = view(call.logits, call.x, "logits");
    args.experts = written_ints(call.experts, {"experts", {p.tokens, p.top_k}, call.x});
    args.offsets = written_ints(call.offsets, {"offsets", {p.experts + 1}, call.x});
    if (call.rng) args.rng = random_state(*call.rng, call.x);
  }

  /// Of the shared expert; what is not wanted is empty or undefined.
  void bind_dshared(const Tensor& dw1, const Tensor& dw2) {
    const bool discrete = problem.parameters.discrete_dw;
    if (dw1.defined() && dw1.dim() == 2) shared1_.bind_dw(as_expert(dw1, discrete));
    if (dw2.defined() && dw2.dim() == 2) shared2_.bind_dw(as_expert(dw2, discrete));
  }
  void accumulate(const int32_t* words) {
    for (LinearBindings* linear : {&fc1, &fc2, &shared1_, &shared2_})
      linear->parameters.accumulate = words;
  }

  template <class Direction>
  void run(Direction direction, int64_t LayerMemory::*workspace_bytes) {
    ExpertLaunch::run(
        [&](const MoePlan& plan, MoeArgs& all, const Workspace& workspace, const Stream& stream) {
          all.shared_fc1 = shared1_.parameters;
          all.shared_fc2 = shared2_.parameters;
          direction(plan, all, workspace, stream);
        },
        workspace_bytes);
  }

 private:
  /// A list of the one expert, which lasts until the next is made.
  TensorList as_expert(const Tensor& weight, bool discrete) {
    one_ = discrete ? weight : weight.unsqueeze(0);
    return {&one_, 1};
  }

  LinearBindings shared1_, shared2_;
  Tensor one_, gate_;
};

}  // namespace cadre::door
