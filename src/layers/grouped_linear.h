#pragma once
#include <string_view>

#include "cadre/grouped_linear.h"
#include "cadre/wgrad_queue.h"
#include "layers/checks.h"
#include "layers/launch.h"
#include "layers/memory.h"

// The parts of a grouped linear layer that other layers put together.
namespace cadre::layers {

/// The tensors of a linear layer, as its steps number them: the caller's, then the copies.
namespace linear {
enum Tensor : int {
  kX,
  kY,
  kDy,
  kDx,
  kW,
  kDw,
  kBias,
  kDbias,
  kBiasScale,
  kDbiasScale,
  kZ,
  kProb,
  kTokens,
  kSlotOf,
  kPlaceOf,
  kXAlongK,
  kXAlongRows,
  kWAlongK,
  kWAlongRows,
  kDyAlongK,
  kDyAlongRows,
  kXAlongKNumbers,
  kWAlongKNumbers,
  kXAlongRowsNumbers,
  kDyAlongRowsNumbers,
  kYScales,
  kDxScales,
  kDwScales,
};
}  // namespace linear

/// One run of a linear layer. Its `pending` is set even where nothing is deferred.
struct LinearRun : LayerRun {
  const GroupedLinearPlan& plan;
  const GroupedLinearArgs& args;

  Operand operand(int id) const;
  Target target(int id) const;
  const float* floats(int id) const { return id == linear::kProb ? args.prob : args.bias_scale; }
  float* written_floats(int) const { return args.dbias_scale; }
  const Offsets& offsets() const { return args.offsets; }
  const uint64_t* rng() const { return args.rng; }
  /// Those of the map; nobody writes it.
  int32_t* words(int id) const {
    return const_cast<int32_t*>(id == linear::kPlaceOf ? args.place_of : args.slot_of);
  }
  /// A weight cache that is not to be refreshed is valid as it is.
  bool skips(const LayerStep& step) const { return step.writes_cache && !args.refresh_weights; }
  void launch_part(const PartPhase&) const {}
};

/// When another layer runs the wgrad of a deferred linear that it holds.
enum class HeldWgrad : uint8_t {
  kLater,   ///< in another run
  kWithin,  ///< in its backward: what wgrad reads of that is left decoded, for fewer bytes moved
            ///< and more of workspace
};

/// A deferred linear that another layer holds, in the recipe as it is.
GroupedLinearPlan plan_held(const GroupedLinearProblem&, const Device&, HeldWgrad);

/// A layer alone or within another one.
inline LinearRun linear_run(const GroupedLinearPlan& plan, const GroupedLinearArgs& args,
                            Workspace workspace, Phase first, Stream stream = {}) {
  return {layer_run(plan, args, workspace, stream, first), plan, args};
}

/// The tensor that wgrad reads as x, if there is a wgrad: the caller's own or a copy.
const LayerTensor& wgrad_input(const GroupedLinearPlan&);
/// Likewise as dy.
const LayerTensor& wgrad_gradient(const GroupedLinearPlan&);

// Everything that a run touches. `op` is the name that errors begin with.
void check_forward(std::string_view op, const LinearRun&);
void check_backward(const LinearRun&, Workspace);
void check_gradients(std::string_view op, const LinearRun&);
void check_wgrad(std::string_view op, const LinearRun&);

/// Whether `tasks` more fit into the queue, if one is given.
template <class Problem>
void check_room(const ops::Checks<Problem>& checks, const WgradQueue* queue, int tasks) {
  if (queue == nullptr) return;
  checks.holds(queue->capacity() - queue->pending() >= tasks, "queue has ", queue->pending(),
               " of ", queue->capacity(), " tasks, must have room for ", tasks,
               queue->capacity() < tasks ? "; make a larger one"
                                         : "; run the pending weight gradients first");
}

/// Whether backward may leave its wgrad to the queue.
template <class Problem>
void check_queue(const ops::Checks<Problem>& checks, const WgradQueue* queue, int tasks) {
  checks.holds(queue == nullptr || checks.problem().options.deferred,
               "queue is given, must be null; the problem says deferred=no");
  check_room(checks, queue, tasks);
}

/// Errors    InvalidArgument for a problem that no plan takes.
void check_problem(const GroupedLinearProblem&);

/// The weights of all experts without data, as the problem lays them out.
TensorView weight_layout(const GroupedLinearProblem&, DType);

/// Runs the steps of a phase; nothing is checked.
void launch(const LinearRun&, Phase);
/// Leaves dw to the queue, if there is one.
void defer(const LinearRun&);

}  // namespace cadre::layers
