#pragma once
#include <cstdint>

#include "cadre/device.h"
#include "cadre/layer.h"
#include "cadre/quantize.h"
#include "cadre/workspace.h"

// The caller's memory, and where the tensors of a layer lie in it.
namespace cadre::layers {

constexpr int64_t kAlignment = 256;

constexpr int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

/// The part of a memory behind `offset`. Null stays null: a memory of no bytes has no address.
inline void* at(void* data, int64_t offset) {
  return data == nullptr ? nullptr : static_cast<char*>(data) + offset;
}
inline Workspace behind(Workspace w, int64_t offset) {
  return {at(w.data, offset), w.bytes - offset};
}
inline Memory part(Memory m, int64_t offset, int64_t bytes) { return {at(m.data, offset), bytes}; }

/// The workspace that a run needs which begins with this phase.
inline int64_t workspace_bytes(const LayerMemory& memory, Phase first) {
  if (first == Phase::kForward) return memory.forward_workspace_bytes;
  return first == Phase::kWgrad ? memory.wgrad_workspace_bytes : memory.backward_workspace_bytes;
}

inline Operand as_operand(const QuantizedView& q) {
  return {.codes = q.codes, .scales = q.scales, .expert_scale = q.expert_scale};
}

/// The memories of one run, by place.
struct Places {
  Workspace workspace;
  Memory saved, pending, weight_cache;
  void* gradient = nullptr;  ///< dw of fc1

  void* data(const LayerTensor& tensor) const {
    switch (tensor.place) {
      case Place::kWorkspace:
        return at(workspace.data, tensor.offset);
      case Place::kSaved:
        return at(saved.data, tensor.offset);
      case Place::kPending:
        return at(pending.data, tensor.offset);
      case Place::kWeightCache:
        return at(weight_cache.data, tensor.offset);
      case Place::kGradient:
        return gradient;
      case Place::kCaller:
        break;
    }
    return nullptr;
  }

  /// A tensor of the layer's.
  QuantizedView copy(const LayerTensor& tensor) const {
    return quantized_view(tensor.layout, data(tensor));
  }

  /// A plain tensor of the layer's.
  TensorView plain(const LayerTensor& tensor) const { return copy(tensor).codes; }
};

/// A plain [R, C] tensor as the shape of an operand.
inline QuantizedShape plain_rows(DType dtype, int64_t rows, int64_t cols) {
  const FormatKind kind = dtype == DType::kF32   ? FormatKind::kF32
                          : dtype == DType::kF16 ? FormatKind::kF16
                                                 : FormatKind::kBf16;
  return {.kind = RowsKind::kRagged, .rows = rows, .cols = cols, .format = format(kind)};
}

}  // namespace cadre::layers
