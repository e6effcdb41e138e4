// What the layers share.
#include "cadre/layer.h"

#include "cadre/error.h"
#include "layers/explain.h"

namespace cadre {

double bytes_per_token(std::span<const KeptPart> parts, int64_t rows, int top_k) {
  if (rows == 0) return 0;
  int64_t bytes = 0;
  for (const KeptPart& part : parts) bytes += part.bytes;
  return double(bytes) / double(rows) * top_k;
}

namespace layers {

std::string explain_memory(const LayerMemory& m, const std::vector<KeptPart>& kept, int64_t rows) {
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
  for (const KeptPart& part : kept)
    lines += text("  kept for backward, of each row: ", part.name, " ",
                  bytes_per_token({&part, 1}, rows),
                  part.place == Place::kCaller ? " (the caller's own)" : "", "\n");
  lines += text("  kept for backward, of each row, together: ", bytes_per_token(kept, rows), "\n");
  return lines;
}

}  // namespace layers
}  // namespace cadre
