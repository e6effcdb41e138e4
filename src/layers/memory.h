#pragma once
#include <algorithm>
#include <cstdint>

#include "cadre/device.h"
#include "cadre/layer.h"
#include "cadre/quantize.h"
#include "cadre/workspace.h"

// How layers share out the caller's memory.
namespace cadre::layers {

constexpr int64_t kAlignment = 256;

constexpr int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

/// Hands out a memory from its start, part after part; only counts.
class Layout {
 public:
  int64_t take(int64_t bytes) {
    const int64_t offset = bytes_;
    bytes_ += aligned(bytes);
    return offset;
  }
  OperandPlan take(Place place, const QuantizedShape& shape) {
    return {.place = place, .offset = take(quantized_bytes(shape)), .shape = shape};
  }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

/// The part of a memory behind `offset`. Null stays null: a memory of no bytes has no address.
inline void* at(void* data, int64_t offset) {
  return data == nullptr ? nullptr : static_cast<char*>(data) + offset;
}
inline Workspace behind(Workspace w, int64_t offset) {
  return {at(w.data, offset), w.bytes - offset};
}
inline Memory part(Memory m, int64_t offset, int64_t bytes) { return {at(m.data, offset), bytes}; }

/// The memories of one run, by place.
struct Places {
  Workspace workspace;
  Memory saved, pending, weight_cache;

  void* data(const OperandPlan& operand) const {
    switch (operand.place) {
      case Place::kWorkspace:
        return at(workspace.data, operand.offset);
      case Place::kSaved:
        return at(saved.data, operand.offset);
      case Place::kPending:
        return at(pending.data, operand.offset);
      case Place::kWeightCache:
        return at(weight_cache.data, operand.offset);
      case Place::kCaller:
        break;
    }
    return nullptr;
  }

  /// The copy of an operand, for the step that writes it.
  QuantizedView copy(const OperandPlan& operand) const {
    return quantized_view(operand.shape, data(operand));
  }

  /// The operand as a product reads it: the caller's own tensor or the copy.
  Operand read(const OperandPlan& operand, const Operand& own) const {
    if (operand.place == Place::kCaller) return own;
    const QuantizedView q = copy(operand);
    return {.codes = q.codes, .scales = q.scales, .expert_scale = q.expert_scale};
  }

  /// A plain tensor between two steps: the caller's own or the layer's.
  TensorView tensor(const OperandPlan& operand, const TensorView& own) const {
    return operand.place == Place::kCaller ? own : copy(operand).codes;
  }
};

/// A plain [R, C] tensor as the shape of an operand.
inline QuantizedShape plain_rows(DType dtype, int64_t rows, int64_t cols) {
  const FormatKind kind = dtype == DType::kF32   ? FormatKind::kF32
                          : dtype == DType::kF16 ? FormatKind::kF16
                                                 : FormatKind::kBf16;
  return {.kind = RowsKind::kRagged, .rows = rows, .cols = cols, .format = format(kind)};
}

}  // namespace cadre::layers
