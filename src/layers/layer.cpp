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

int64_t plain_bytes(RowsKind kind, int64_t rows, int64_t cols, int experts, DType dtype) {
  return (kind == RowsKind::kWeights ? experts : 1) * rows * bytes_for(dtype, cols);
}

bool reads_twice(const std::optional<Format>& format) {
  return format && reads_source_twice(*format);
}

int64_t moved_bytes(const QuantizeProblem& q) {
  const int reads = reads_twice(q.along_k) || reads_twice(q.along_rows) ? 2 : 1;
  const int64_t rows = q.gather ? std::min(q.tokens, q.rows) : q.rows;
  int64_t bytes = reads * plain_bytes(q.kind, rows, q.cols, q.experts, q.source);
  if (q.along_k) bytes += quantized_bytes(copy_shape(q, Axis::kAlongK));
  if (q.along_rows) bytes += quantized_bytes(copy_shape(q, Axis::kAlongRows));
  return bytes;
}

int64_t moved_bytes(const DequantizeProblem& d) {
  const QuantizedShape& s = d.source;
  return quantized_bytes(s) + plain_bytes(s.kind, s.rows, s.cols, s.experts, d.out);
}

/// What a step that quantises, or decodes again, reads and writes; zero of all others.
int64_t quantising_bytes(const LayerStep& step) {
  if (const auto* quantize = std::get_if<QuantizePlan>(&step.plan))
    return moved_bytes(quantize->problem);
  const auto* activation = std::get_if<ActivationPlan>(&step.plan);
  if (activation != nullptr && activation->problem.along_k)
    return quantized_bytes(copy_shape(activation->problem));
  const auto* decode = std::get_if<DequantizePlan>(&step.plan);
  return decode == nullptr ? 0 : moved_bytes(decode->problem);
}

/// "x, w along K (decoded)", those that there are.
template <size_t kCount>
std::string names(const LayerPlan& plan, const std::array<int, kCount>& ids) {
  std::string words;
  for (const int id : ids)
    if (id != kNone) {
      const LayerTensor& tensor = plan.tensors[size_t(id)];
      const bool numbers = tensor.shape.decoded && !tensor.name.ends_with(" decoded");
      words += text(words.empty() ? "" : ", ", tensor.name, numbers ? " (decoded)" : "");
    }
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
          lines += std::is_same_v<decltype(plan), const ScaleProduct&> ? ": alpha, of each expert\n"
                                                                       : "\n";
        }
      },
      step.plan);
  const std::string reads = names(layer, step.reads), writes = names(layer, step.writes);
  if (reads.empty() && writes.empty()) return lines;
  return lines + text("    ", reads, writes.empty() ? "" : " -> ", writes, "\n");
}

std::string explain_steps(const LayerPlan& plan) {
  std::string forward = "forward\n", backward = "backward\n";
  int64_t moved[2] = {0, 0};
  for (const LayerStep& step : plan.steps) {
    const bool is_forward = step.phase == Phase::kForward;
    (is_forward ? forward : backward) += explain_step(plan, step);
    moved[is_forward ? 0 : 1] += quantising_bytes(step);
  }
  const auto line = [](int64_t bytes) {
    return bytes == 0 ? "" : text("  bytes that quantising reads and writes: ", bytes, "\n");
  };
  return forward + line(moved[0]) + backward + line(moved[1]);
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
