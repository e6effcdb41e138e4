// What the layers share.
#include "cadre/layer.h"

#include <algorithm>

#include "cadre/error.h"
#include "layers/explain.h"

namespace cadre {

double bytes_per_token(std::span<const KeptPart> parts, int64_t rows, int top_k) {
  if (rows == 0) return 0;
  int64_t bytes = 0;
  for (const KeptPart& part : parts) bytes += part.bytes;
  return double(bytes) / double(rows) * top_k;
}

const LayerTensor* find_tensor(const LayerPlan& plan, std::string_view name) {
  for (const LayerTensor& tensor : plan.tensors)
    if (tensor.name == name && (tensor.written >= 0 || tensor.read >= 0)) return &tensor;
  return nullptr;
}

bool learns(const LayerPlan& plan) {
  return std::any_of(plan.steps.begin(), plan.steps.end(),
                     [](const LayerStep& step) { return step.phase != Phase::kForward; });
}

namespace layers {
namespace {

/// "x, w along K", those that there are.
template <size_t kCount>
std::string names(const LayerPlan& plan, const std::array<int, kCount>& ids) {
  std::string words;
  for (const int id : ids)
    if (id != kNone) words += text(words.empty() ? "" : ", ", plan.tensors[size_t(id)].name);
  return words;
}

}  // namespace

std::string explain_step(const LayerPlan& layer, const LayerStep& step) {
  std::string lines =
      text("  ", step.name, step.phase == Phase::kWgrad && layer.deferred ? ", deferred" : "");
  std::visit(
      [&](const auto& plan) {
        if constexpr (requires { plan.problem; }) {
          lines += text(": ", plan.name, plan.exact ? "" : " (not exact)", "  [",
                        to_string(plan.problem), "]\n");
          for (const Refusal& refusal : plan.refusals)
            lines += text("    not ", refusal.name, ": ", refusal.why, "\n");
        } else {
          lines += "\n";
        }
      },
      step.plan);
  const std::string reads = names(layer, step.reads), writes = names(layer, step.writes);
  if (reads.empty() && writes.empty()) return lines;
  return lines + text("    ", reads, writes.empty() ? "" : " -> ", writes, "\n");
}

std::string explain_steps(const LayerPlan& plan) {
  std::string forward = "forward\n", backward = "backward\n";
  for (const LayerStep& step : plan.steps)
    (step.phase == Phase::kForward ? forward : backward) += explain_step(plan, step);
  return forward + backward;
}

std::string explain_memory(const LayerMemory& m, const std::vector<KeptPart>& kept,
                           const Items& items) {
  std::string lines = "memory in bytes\n";
  const auto line = [&](std::string_view what, int64_t bytes) {
    if (bytes != 0) lines += text("  ", what, ": ", bytes, "\n");
  };
  line("workspace of forward", m.forward_workspace_bytes);
  line("workspace of backward", m.backward_workspace_bytes);
  line("workspace of wgrad", m.wgrad_workspace_bytes);
  line("saved from forward to backward", m.saved_bytes);
  line("pending from backward to wgrad", m.pending_bytes);
  line("weight cache", m.weight_cache_bytes);
  line("at most at once", m.saved_bytes + m.pending_bytes + m.weight_cache_bytes +
                              std::max({m.forward_workspace_bytes, m.backward_workspace_bytes,
                                        m.wgrad_workspace_bytes}));
  for (const KeptPart& part : kept)
    lines += text("  kept for backward, of each ", items.name, ": ", part.name, " ",
                  bytes_per_token({&part, 1}, items.count),
                  part.place == Place::kCaller ? " (the caller's own)" : "", "\n");
  lines += text("  kept for backward, of each ", items.name,
                ", together: ", bytes_per_token(kept, items.count), "\n");
  return lines;
}

}  // namespace layers
}  // namespace cadre
