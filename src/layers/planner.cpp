// Sharing out the memory of a layer: one rule for all of them.
#include "layers/planner.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "layers/memory.h"

namespace cadre::layers {
namespace {

/// The steps from the first that writes a tensor to the last that reads it.
struct Life {
  int first = 0, last = std::numeric_limits<int>::max();

  bool meets(const Life& other) const { return first <= other.last && other.first <= last; }
};

/// Hands out a memory; only counts. What lives at the same time lies apart.
class Layout {
 public:
  int64_t take(int64_t bytes, const Life& life = {}) {
    if (bytes == 0) return 0;
    Block block{0, aligned(bytes), life};
    for (const Block& other : blocks_) {
      if (!life.meets(other.life)) continue;
      if (block.offset + block.bytes <= other.offset) break;
      block.offset = std::max(block.offset, other.offset + other.bytes);
    }
    bytes_ = std::max(bytes_, block.offset + block.bytes);
    const auto before = [](const Block& a, const Block& b) { return a.offset < b.offset; };
    blocks_.insert(std::upper_bound(blocks_.begin(), blocks_.end(), block, before), block);
    return block.offset;
  }
  int64_t bytes() const { return bytes_; }
  /// To the end of what lives at some time of these steps.
  int64_t bytes(const Life& during) const {
    int64_t end = 0;
    for (const Block& block : blocks_)
      if (block.life.meets(during)) end = std::max(end, block.offset + block.bytes);
    return end;
  }

 private:
  struct Block {
    int64_t offset, bytes;
    Life life;
  };
  std::vector<Block> blocks_;  ///< by their offsets
  int64_t bytes_ = 0;
};

int64_t own_workspace(const LayerStep& step) {
  return std::visit(
      [](const auto& plan) -> int64_t {
        if constexpr (requires { plan.workspace_bytes; }) return plan.workspace_bytes;
        return 0;
      },
      step.plan);
}

/// Shares out the memory of a plan whose steps are there.
class Sharing {
 public:
  Sharing(LayerPlan& plan, WgradRuns wgrad) : plan_(plan), wgrad_(wgrad) {}

  void run() {
    note_lives();
    for (LayerTensor& tensor : plan_.tensors)
      if (tensor.made && tensor.written >= 0 && tensor.place == Place::kCaller)
        tensor.place = place_of(tensor);
    take_what_lasts();
    take_workspace();
    for (LayerTensor& tensor : plan_.tensors)
      if (takes_over(tensor)) {
        tensor.place = plan_.tensors[size_t(tensor.over)].place;
        tensor.offset = plan_.tensors[size_t(tensor.over)].offset;
      }
    count();
  }

 private:
  /// Who writes each tensor first and who reads it last.
  void note_lives() {
    for (int i = 0; i < int(plan_.steps.size()); ++i) {
      const LayerStep& step = plan_.steps[size_t(i)];
      for (const int id : step.reads)
        if (id != kNone) plan_.tensors[size_t(id)].read = i;
      for (const int id : step.writes)
        if (id != kNone && plan_.tensors[size_t(id)].written < 0)
          plan_.tensors[size_t(id)].written = i;
    }
  }

  Phase written(const LayerTensor& t) const { return plan_.steps[size_t(t.written)].phase; }
  Phase read(const LayerTensor& t) const {
    return t.read < 0 ? written(t) : plan_.steps[size_t(t.read)].phase;
  }

  /// Where a tensor lies that is written in one phase and read in another one for the last time.
  Place place_of(const LayerTensor& t) const {
    if (t.lasting) return Place::kWeightCache;
    if (written(t) == Phase::kForward)
      return read(t) == Phase::kForward ? Place::kWorkspace : Place::kSaved;
    const bool waits = written(t) != Phase::kWgrad && read(t) == Phase::kWgrad;
    return waits && wgrad_ != WgradRuns::kWithin ? Place::kPending : Place::kWorkspace;
  }

  /// The workspace that a tensor lies in, by the phase that writes it.
  Layout& workspace(Phase phase) {
    if (phase == Phase::kForward) return forward_;
    return phase == Phase::kWgrad && wgrad_ == WgradRuns::kLater ? later_ : backward_;
  }

  /// Whether it lies over the tensor that it names: the layer's own, that nobody reads afterwards.
  bool takes_over(const LayerTensor& t) {
    if (t.over == kNone || t.written < 0) return false;
    const LayerTensor& under = plan_.tensors[size_t(t.over)];
    if (!under.made || under.written < 0 || under.read > t.written) return false;
    if (under.layout.bytes != t.layout.bytes) return false;
    if (under.place != Place::kWorkspace) return under.place != Place::kPending;
    return t.place == Place::kWorkspace && &workspace(written(t)) == &workspace(written(under));
  }

  /// Memories that outlive a run, in the order in which their tensors and parts were named.
  void take_what_lasts() {
    auto part = plan_.parts.begin();
    for (int id = 0; id <= int(plan_.tensors.size()); ++id) {
      for (; part != plan_.parts.end() && part->before == id; ++part) {
        part->saved_offset = saved_.take(part->memory.saved_bytes);
        part->weight_cache_offset = cache_.take(part->memory.weight_cache_bytes);
        if (wgrad_ != WgradRuns::kWithin)
          part->pending_offset = pending_.take(part->memory.pending_bytes);
      }
      if (id == int(plan_.tensors.size())) break;
      LayerTensor& t = plan_.tensors[size_t(id)];
      if (takes_over(t)) continue;
      if (t.place == Place::kSaved) t.offset = saved_.take(t.layout.bytes);
      if (t.place == Place::kPending) t.offset = pending_.take(t.layout.bytes);
      if (t.place == Place::kWeightCache) t.offset = cache_.take(t.layout.bytes);
    }
  }

  /// A tensor, or what a part leaves from its backward to its wgrad, in a workspace.
  struct Block {
    int64_t bytes;
    Life life;
    Layout* layout;
    int64_t* offset;
  };

  /// What waits for wgrad first, so that its scratch can lie where the others lay; of each kind the
  /// largest.
  void take_workspace() {
    std::vector<Block> blocks;
    for (LayerTensor& t : plan_.tensors)
      if (t.place == Place::kWorkspace && !takes_over(t))
        blocks.push_back({t.layout.bytes, life_of(t), &workspace(written(t)), &t.offset});
    if (wgrad_ == WgradRuns::kWithin)
      for (LayerPart& part : plan_.parts)
        blocks.push_back(
            {part.memory.pending_bytes, life_of(part), &backward_, &part.pending_offset});
    const auto rank = [&](const Block& block) {
      const bool waits = plan_.steps[size_t(block.life.last)].phase == Phase::kWgrad;
      return std::pair(waits, block.bytes);
    };
    std::sort(blocks.begin(), blocks.end(),
              [&](const Block& a, const Block& b) { return rank(a) > rank(b); });
    for (const Block& block : blocks) *block.offset = block.layout->take(block.bytes, block.life);
  }

  /// To the end of the tensor that lies over it.
  Life life_of(const LayerTensor& t) {
    Life life{t.written, std::max(t.written, t.read)};
    for (const LayerTensor& other : plan_.tensors)
      if (other.over != kNone && &plan_.tensors[size_t(other.over)] == &t && takes_over(other))
        life.last = std::max({life.last, other.written, other.read});
    return life;
  }
  /// From its backward to its wgrad.
  Life life_of(const LayerPart& part) const {
    Life life{int(plan_.steps.size()), 0};
    for (int i = 0; i < int(plan_.steps.size()); ++i) {
      const auto* of = std::get_if<PartPhase>(&plan_.steps[size_t(i)].plan);
      if (of == nullptr || &plan_.parts[size_t(of->part)] != &part) continue;
      if (of->phase == Phase::kForward) continue;
      life.first = std::min(life.first, i);
      life.last = i;
    }
    return life;
  }

  /// The largest workspace of the steps of a phase.
  int64_t scratch(Phase phase) const {
    int64_t most = 0;
    for (const LayerStep& step : plan_.steps)
      if (step.phase == phase) most = std::max(most, own_workspace(step));
    for (const LayerPart& part : plan_.parts)
      most = std::max(most, workspace_bytes(part.memory, phase));
    return most;
  }

  /// What lies in the workspace before the scratch of a phase. A part has one scratch in all of a
  /// run, so that with parts no phase has less than another.
  int64_t bytes_of(Phase phase) {
    const Layout& layout = workspace(phase);
    if (!plan_.parts.empty()) return layout.bytes();
    const auto in_phase = [phase](const LayerStep& step) { return step.phase == phase; };
    const auto begin = plan_.steps.begin(), end = plan_.steps.end();
    const auto first = std::find_if(begin, end, in_phase);
    if (first == end) return 0;
    const auto next = std::find_if_not(first, end, in_phase);
    return layout.bytes({int(first - begin), int(next - begin) - 1});
  }

  void count() {
    using enum Phase;
    plan_.deferred = wgrad_ == WgradRuns::kLater;
    for (const Phase phase : {kForward, kBackward, kInputAgain, kWgrad})
      plan_.copies_bytes[size_t(phase)] = bytes_of(phase);
    LayerMemory& m = plan_.memory;
    m.saved_bytes = saved_.bytes();
    m.pending_bytes = pending_.bytes();
    m.weight_cache_bytes = cache_.bytes();
    const auto with_scratch = [&](Phase phase) { return bytes_of(phase) + scratch(phase); };
    m.forward_workspace_bytes = with_scratch(kForward);
    m.backward_workspace_bytes = std::max(with_scratch(kBackward), with_scratch(kInputAgain));
    m.wgrad_workspace_bytes = with_scratch(kWgrad);
    if (plan_.deferred) return;
    m.backward_workspace_bytes =
        std::max({m.backward_workspace_bytes, m.wgrad_workspace_bytes, backward_.bytes()});
    if (wgrad_ == WgradRuns::kWithin) m.wgrad_workspace_bytes = 0;
  }

  LayerPlan& plan_;
  const WgradRuns wgrad_;
  Layout forward_, backward_, later_, saved_, pending_, cache_;
};

}  // namespace

void Row::share_memory(WgradRuns wgrad) {
  Sharing(plan_, wgrad).run();
  for (LayerStep& step : plan_.steps)
    for (const int id : step.writes)
      step.writes_cache = step.writes_cache || (id != kNone && plan_.tensors[size_t(id)].lasting);
}

}  // namespace cadre::layers
