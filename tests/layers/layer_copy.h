#pragma once
#include "cadre/sequential.h"
#include "cadre/wgrad_queue.h"
#include "tests/judge/machine_copy.h"

// Training steps of layers on a machine.
namespace cadre::test {

/// A layer's arguments for a copy of its case.
template <class Args>
struct MovedArgs {
  MovedArgs(const MachineCopy& copy, const Args& own) : args(copy.moved(own)) {}
  Args args;
};
/// A row's lists stay on the host; what they name does not.
template <>
struct MovedArgs<SequentialArgs> {
  MovedArgs(const MachineCopy& copy, const SequentialArgs& own)
      : parameters(own.parameters.begin(), own.parameters.end()),
        inputs(own.extra_inputs.begin(), own.extra_inputs.end()),
        gradients(own.extra_gradients.begin(), own.extra_gradients.end()),
        args(copy.moved(own)) {
    for (LinearParameters& p : parameters) p = copy.moved(p);
    for (const float*& p : inputs) p = copy.moved(p);
    for (float*& p : gradients) p = copy.moved(p);
    args.parameters = parameters;
    args.extra_inputs = inputs;
    args.extra_gradients = gradients;
  }
  std::vector<LinearParameters> parameters;
  std::vector<const float*> inputs;
  std::vector<float*> gradients;
  SequentialArgs args;
};

/// A case of a layer with a copy of all its memory on a machine. Its steps run there.
template <class Case>
class LayerCopy {
 public:
  LayerCopy(Machine& machine, Case& c)
      : case_(c),
        forward_(c.plan.memory.forward_workspace_bytes),
        backward_(c.plan.memory.backward_workspace_bytes),
        wgrad_(c.plan.memory.wgrad_workspace_bytes),
        queue_(kTasks),
        memory(machine, *this) {
    memory.upload();
  }

  template <class Visit>
  void for_pieces(Visit&& visit) const {
    case_.for_pieces(visit);
    visit(piece("workspace of forward", forward_));
    visit(piece("workspace of backward", backward_));
    visit(piece("workspace of wgrad", wgrad_));
  }

  /// Forward, backward and the deferred weight gradients, by the queue or at once.
  void step(Stream stream, bool by_queue = true) {
    case_.queue = by_queue && case_.defers() ? &queue_ : nullptr;
    const MovedArgs moved(memory, case_.args());
    case_.queue = nullptr;
    const auto& plan = case_.plan;
    forward(plan, moved.args, memory.moved(forward_), stream);
    if (!case_.learns()) return;
    backward(plan, moved.args, memory.moved(backward_), stream);
    if (!by_queue && case_.defers()) wgrad(plan, moved.args, memory.moved(wgrad_), stream);
    while (queue_.pending() > 0) queue_.run_next(0, memory.moved(wgrad_), stream);
  }

  Workspace forward_workspace() const { return memory.moved(forward_); }
  Workspace backward_workspace() const { return memory.moved(backward_); }

 private:
  static constexpr int kTasks = 4;

  Case& case_;
  OwnedWorkspace forward_, backward_, wgrad_;
  WgradQueue queue_;

 public:
  MachineCopy memory;
};

}  // namespace cadre::test
