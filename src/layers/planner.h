#pragma once
#include <algorithm>
#include <initializer_list>
#include <string>
#include <utility>

#include "cadre/layer.h"

// How the plans of all layers are put together: tensors are named, steps are added, and then the
// memory is shared out.
namespace cadre::layers {

/// When dw is made, which says where the tensors lie that it reads.
enum class WgradRuns : uint8_t {
  kLater,     ///< in a run of its own: what it reads lies in `pending`
  kByHolder,  ///< in the same run, when the layer that holds this one says so: in `pending` too
  kWithin,    ///< as a part of backward: among its tensors
};

/// Puts the steps of a layer in a row.
class Row {
 public:
  explicit Row(LayerPlan& plan) : plan_(plan) {}

  /// The caller's tensor; codes and scales have a shape.
  int own(std::string name, const QuantizedShape& shape = {}) {
    return add({.name = std::move(name), .shape = shape});
  }
  /// A tensor that the layer makes, if a step writes it.
  int made(std::string name, const QuantizedShape& shape, bool lasting = false) {
    return add({.name = std::move(name), .made = true, .lasting = lasting, .shape = shape});
  }
  /// The same, over another tensor of the same bytes, as soon as nobody reads that one: the step
  /// that reads it last may write this one, element by element or after it has read all. One alone
  /// lies over a tensor of the layer's own, and nothing over that.
  int made_over(int under, std::string name, const QuantizedShape& shape) {
    return add({.name = std::move(name), .made = true, .shape = shape, .over = under});
  }
  /// A layer within this one. What of its memory outlives a run lies before that of the tensors
  /// that are added later.
  int part(const LayerMemory& memory) {
    plan_.parts.push_back({.memory = memory, .before = int(plan_.tensors.size())});
    return int(plan_.parts.size()) - 1;
  }
  /// Steps are added in the order in which they run; what they read and write as LayerStep says.
  template <class StepPlan>
  void step(Phase phase, std::string name, StepPlan step, std::initializer_list<int> reads,
            std::initializer_list<int> writes) {
    if constexpr (requires { step.exact; }) plan_.exact = plan_.exact && step.exact;
    LayerStep& last = plan_.steps.emplace_back();
    last.name = std::move(name);
    last.phase = phase;
    last.plan = std::move(step);
    std::copy(reads.begin(), reads.end(), last.reads.begin());
    std::copy(writes.begin(), writes.end(), last.writes.begin());
  }

  /// Gives every tensor that a step writes its place, from who writes it and who reads it last, and
  /// counts what the caller provides. In a workspace, tensors that live at different times share.
  void share_memory(WgradRuns);

 private:
  int add(LayerTensor tensor) {
    tensor.layout = quantized_layout(tensor.shape);
    plan_.tensors.push_back(std::move(tensor));
    return int(plan_.tensors.size()) - 1;
  }

  LayerPlan& plan_;
};

}  // namespace cadre::layers
