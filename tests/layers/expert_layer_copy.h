#pragma once
#include "tests/layers/expert_layer_case.h"
#include "tests/layers/layer_copy.h"

// The steps of an expert layer on a machine.
namespace cadre::test {

/// A layer with a copy of all its memory on a machine. Its steps run there one by one.
class ExpertLayerCopy {
 public:
  ExpertLayerCopy(Machine& machine, ExpertLayerCase& c)
      : case_(c), mlp_(machine, c.mlp), memory_(machine, c) {
    if (c.shared) shared_.emplace(machine, *c.shared);
    memory_.upload();
  }

  /// The steps of the expert MLP run in the layer's copy, with workspaces of their own. Routed:
  /// nothing is chosen, and the gradient of prob is the last.
  void step(Stream stream, bool routed = false) {
    const auto move = [this](auto args) { return memory_.moved(args); };
    for (LayerStage stage : kLayerStages) {
      if (routed && (stage == LayerStage::kRoute || stage == LayerStage::kRouteBack)) continue;
      case_.launch(stage, move, stream);
      if (stage == LayerStage::kPermute) {
        forward(case_.mlp.plan, move(case_.mlp.args()), mlp_.forward_workspace(), stream);
        if (shared_)
          forward(case_.shared->plan, move(case_.shared->args()), shared_->forward_workspace(),
                  stream);
      }
      if (stage == LayerStage::kCombineBack) {
        backward(case_.mlp.plan, move(case_.mlp.args()), mlp_.backward_workspace(), stream);
        if (shared_)
          backward(case_.shared->plan, move(case_.shared->args()), shared_->backward_workspace(),
                   stream);
      }
    }
  }
  MachineCopy& memory() { return memory_; }

 private:
  ExpertLayerCase& case_;
  LayerCopy<MlpCase> mlp_;
  std::optional<LayerCopy<MlpCase>> shared_;
  MachineCopy memory_;
};

}  // namespace cadre::test
