#pragma once
#include <string_view>

#include "cadre/grouped_linear.h"
#include "cadre/wgrad_queue.h"
#include "layers/checks.h"
#include "layers/memory.h"

// The parts of a grouped linear layer that other layers put together.
namespace cadre::layers {

/// One run of a layer. `pending` of the arguments is set even where nothing is deferred.
struct LinearRun {
  const GroupedLinearPlan& plan;
  const GroupedLinearArgs& args;
  Workspace workspace{};
  Stream stream{};

  Places places() const { return {workspace, args.saved, args.pending, args.weight_cache}; }
};

// Everything that a run touches. `op` is the name that errors begin with.
void check_forward(std::string_view op, const LinearRun&);
void check_backward(const GroupedLinearPlan&, const GroupedLinearArgs&, Workspace);
void check_gradients(std::string_view op, const LinearRun&);
void check_wgrad(std::string_view op, const LinearRun&);

/// Whether `tasks` more fit into the queue, if one is given.
template <class Problem>
void check_room(const ops::Checks<Problem>& checks, const WgradQueue* queue, int tasks) {
  if (queue == nullptr) return;
  checks.holds(queue->capacity() - queue->pending() >= tasks, "queue has ", queue->pending(),
               " of ", queue->capacity(), " tasks, must have room for ", tasks,
               "; run the pending weight gradients first");
}

/// Whether backward may leave its wgrad to the queue.
template <class Problem>
void check_queue(const ops::Checks<Problem>& checks, const WgradQueue* queue, int tasks) {
  checks.holds(queue == nullptr || checks.problem().deferred,
               "queue is given, must be null; the problem says deferred=no");
  check_room(checks, queue, tasks);
}

/// The weights of all experts without data, as the problem lays them out.
TensorView weight_layout(const GroupedLinearProblem&, DType);

// The products' arguments.
GroupedGemmArgs fprop_args(const LinearRun&);
GroupedGemmArgs dgrad_args(const LinearRun&);
GroupedGemmArgs wgrad_args(const LinearRun&);

// The steps; nothing is checked.
void multiply(const LinearRun&);    ///< quantise w and x, y
void gradients(const LinearRun&);   ///< quantise dy, dx, dbias
void keep_input(const LinearRun&);  ///< quantise x again for wgrad
void weigh(const LinearRun&);       ///< dw
void defer(const LinearRun&);       ///< dw, left to the queue, if there is one

}  // namespace cadre::layers
