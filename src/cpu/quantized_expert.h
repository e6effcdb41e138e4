#pragma once
#include <cstdint>

#include "cadre/quantize.h"
#include "schedule/expert_rows.h"

// One expert's part of a tensor, as matrices: routed rows and weights then look alike.
namespace cadre::cpu {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Moves the start of a view by elements; 4-bit ones only by whole bytes.
inline TensorView moved(TensorView v, int64_t elements_of_v) {
  if (v.data != nullptr) v.data = static_cast<char*>(v.data) + elements_of_v * bits(v.dtype) / 8;
  return v;
}

/// Rows [first, first + count) of a matrix.
inline TensorView rows_of_matrix(const TensorView& matrix, CodeRows rows) {
  TensorView v = moved(matrix, rows.first * matrix.stride[0]);
  v.shape[0] = rows.count;
  return v;
}

/// The matrix [i, :, :] of a tensor.
inline TensorView matrix_of(const TensorView& tensor, int64_t i) {
  TensorView v = moved(tensor, i * tensor.stride[0]);
  v.rank = 2;
  v.shape = {tensor[1], tensor[2]};
  v.stride = {tensor.stride[1], tensor.stride[2]};
  return v;
}

/// Codes and scales of one expert.
struct QuantizedExpert {
  TensorView codes;               ///< [rows, cols]; whole blocks of rows if transformed
  TensorView scales;              ///< [blocks down, blocks across]; empty if there are none
  float* expert_scale = nullptr;  ///< one value; null if there is none
};

/// The part of expert e, whose rows are `rows` (routed rows; 0 to N for weights).
inline QuantizedExpert expert_of(const QuantizedShape& shape, const QuantizedView& q, int expert,
                                 schedule::ExpertRows rows) {
  QuantizedExpert part;
  if (q.expert_scale != nullptr) part.expert_scale = q.expert_scale + expert;
  if (shape.kind == RowsKind::kWeights) {
    part.codes = matrix_of(q.codes, expert);
    if (q.scales.rank != 0) part.scales = matrix_of(q.scales, expert);
    return part;
  }
  const CodeRows own{rows.first, rows.count()};
  part.codes = rows_of_matrix(q.codes, code_rows(shape.format, shape.axis, own, expert));
  if (q.scales.rank == 0) return part;
  const int64_t block = info(shape.format.kind).block;
  const bool down = shape.format.square || shape.axis == Axis::kAlongRows;
  const CodeRows blocks{first_block(own.first, expert, block), ceil_div(own.count, block)};
  part.scales = rows_of_matrix(q.scales, down ? blocks : own);
  return part;
}

/// The extent of the codes that share a scale; a whole expert for formats without blocks.
struct BlockExtent {
  int64_t rows, cols;
};
inline BlockExtent block_extent(const Format& format, Axis axis, const TensorView& codes) {
  const int64_t block = info(format.kind).block;
  if (block == 0) return {codes[0], codes[1]};
  if (format.square) return {block, block};
  return axis == Axis::kAlongK ? BlockExtent{1, block} : BlockExtent{block, 1};
}

/// Calls `work(expert, rows)` for every expert: the clamped rows of its offsets, or 0 to N.
template <class Work>
void for_each_expert(const QuantizedShape& shape, const Offsets& offsets, Work&& work) {
  if (shape.kind == RowsKind::kWeights) {
    for (int e = 0; e < shape.experts; ++e) work(e, schedule::ExpertRows{0, shape.rows});
    return;
  }
  schedule::ExpertWalk walk(offsets.data, shape.experts, shape.rows);
  while (walk.next()) work(walk.expert(), walk.rows());
}

/// The shape of the copy of a problem along one axis; that copy must be wanted.
inline QuantizedShape shape_of(const QuantizeProblem& p, Axis axis) {
  const Format& format = axis == Axis::kAlongK ? *p.along_k : *p.along_rows;
  return {p.kind, p.rows, p.cols, p.experts, format, axis};
}

/// One expert's matrix of what is to be quantised.
inline TensorView source_of(const QuantizeProblem& p, const QuantizeArgs& args, int expert,
                            schedule::ExpertRows rows) {
  if (p.kind == RowsKind::kRagged) return rows_of_matrix(args.source, {rows.first, rows.count()});
  if (!p.discrete) return matrix_of(args.source, expert);
  TensorView v = matrix_of(args.source, 0);
  v.data = const_cast<void*>(args.discrete[expert]);
  return v;
}

}  // namespace cadre::cpu
