// Sharing out the memory of a layer: one rule for all of them.
#include "layers/planner.h"

#include <algorithm>

#include "layers/memory.h"

namespace cadre::layers {
namespace {

/// Hands out a memory from its start, part after part; only counts.
class Layout {
 public:
  int64_t take(int64_t bytes) {
    const int64_t offset = bytes_;
    bytes_ += aligned(bytes);
    return offset;
  }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

struct Layouts {
  Layout forward, backward, saved, pending, cache;
};

/// Who writes each tensor first and who reads it last.
void note_lives(LayerPlan& plan) {
  for (int i = 0; i < int(plan.steps.size()); ++i) {
    const LayerStep& step = plan.steps[size_t(i)];
    for (const int id : step.reads)
      if (id != kNone) plan.tensors[size_t(id)].read = i;
    for (const int id : step.writes)
      if (id != kNone && plan.tensors[size_t(id)].written < 0) plan.tensors[size_t(id)].written = i;
  }
}

/// Where a tensor lies that is written in one phase and read in another one for the last time.
Place place_of(const LayerTensor& tensor, Phase written, Phase read, WgradRuns wgrad) {
  if (tensor.lasting) return Place::kWeightCache;
  if (written == Phase::kForward)
    return read == Phase::kForward ? Place::kWorkspace : Place::kSaved;
  const bool outlives_backward = read == Phase::kWgrad && wgrad != WgradRuns::kWithin;
  return outlives_backward ? Place::kPending : Place::kWorkspace;
}

void place(LayerPlan& plan, LayerTensor& tensor, Layouts& layouts, WgradRuns wgrad) {
  if (!tensor.made || tensor.written < 0) return;
  const Phase written = plan.steps[size_t(tensor.written)].phase;
  const Phase read = tensor.read < 0 ? written : plan.steps[size_t(tensor.read)].phase;
  tensor.place = place_of(tensor, written, read, wgrad);
  Layout& layout = tensor.place == Place::kSaved         ? layouts.saved
                   : tensor.place == Place::kPending     ? layouts.pending
                   : tensor.place == Place::kWeightCache ? layouts.cache
                   : written == Phase::kForward          ? layouts.forward
                                                         : layouts.backward;
  tensor.offset = layout.take(tensor.layout.bytes);
}

void place(LayerPart& part, Layouts& layouts) {
  part.saved_offset = layouts.saved.take(part.memory.saved_bytes);
  part.pending_offset = layouts.pending.take(part.memory.pending_bytes);
  part.weight_cache_offset = layouts.cache.take(part.memory.weight_cache_bytes);
}

int64_t own_workspace(const LayerStep& step) {
  return std::visit(
      [](const auto& plan) -> int64_t {
        if constexpr (requires { plan.workspace_bytes; }) return plan.workspace_bytes;
        return 0;
      },
      step.plan);
}

/// The largest workspace of the steps of some phases.
int64_t scratch(const LayerPlan& plan, std::initializer_list<Phase> phases) {
  int64_t most = 0;
  for (const Phase phase : phases) {
    for (const LayerStep& step : plan.steps)
      if (step.phase == phase) most = std::max(most, own_workspace(step));
    for (const LayerPart& part : plan.parts)
      most = std::max(most, workspace_bytes(part.memory, phase));
  }
  return most;
}

void count_memory(LayerPlan& plan, const Layouts& layouts, WgradRuns wgrad) {
  const int64_t backward = scratch(plan, {Phase::kBackward, Phase::kInputAgain});
  const int64_t weigh = scratch(plan, {Phase::kWgrad});
  const int64_t backward_bytes = layouts.backward.bytes();
  const int64_t before_wgrad = wgrad == WgradRuns::kWithin ? backward_bytes : 0;
  plan.copies_bytes = {layouts.forward.bytes(), backward_bytes, backward_bytes, before_wgrad};
  plan.pending_bytes = layouts.pending.bytes();
  LayerMemory& m = plan.memory;
  m.saved_bytes = layouts.saved.bytes();
  m.weight_cache_bytes = layouts.cache.bytes();
  m.forward_workspace_bytes = layouts.forward.bytes() + scratch(plan, {Phase::kForward});
  m.backward_workspace_bytes = backward_bytes + backward;
  plan.deferred = wgrad == WgradRuns::kLater;
  if (plan.deferred) {
    m.pending_bytes = layouts.pending.bytes();
    m.wgrad_workspace_bytes = weigh;
    return;
  }
  m.backward_workspace_bytes =
      layouts.pending.bytes() + std::max(m.backward_workspace_bytes, before_wgrad + weigh);
}

}  // namespace

void Row::share_memory(WgradRuns wgrad) {
  note_lives(plan_);
  Layouts layouts;
  auto part = plan_.parts.begin();
  for (int id = 0; id <= int(plan_.tensors.size()); ++id) {
    for (; part != plan_.parts.end() && part->before == id; ++part) place(*part, layouts);
    if (id < int(plan_.tensors.size())) place(plan_, plan_.tensors[size_t(id)], layouts, wgrad);
  }
  for (LayerStep& step : plan_.steps)
    for (const int id : step.writes)
      step.writes_cache = step.writes_cache || (id != kNone && plan_.tensors[size_t(id)].lasting);
  count_memory(plan_, layouts, wgrad);
}

}  // namespace cadre::layers
