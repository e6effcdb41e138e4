#pragma once
#include <cstdint>

#include "cadre/quantize.h"
#include "schedule/expert_rows.h"
#include "schedule/row_tokens.h"

// One expert's part of a tensor, as matrices: routed rows and weights then look alike.
namespace cadre::cpu {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Where the element [i, j] of a matrix is, in elements.
inline int64_t offset_of(const TensorView& matrix, int64_t i, int64_t j) {
  return i * matrix.stride[0] + j * matrix.stride[1];
}

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

/// A part of a matrix: `rows` x `cols` elements, of which the first is [row, col].
struct Window {
  int64_t row, col, rows, cols;
};
inline TensorView window_of(const TensorView& matrix, const Window& w) {
  TensorView v = moved(matrix, offset_of(matrix, w.row, w.col));
  v.shape = {w.rows, w.cols};
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
  CodeRows stored = code_rows(shape.format, shape.axis, own, expert);
  if (q.block_offsets != nullptr) stored.first = q.block_offsets[expert];
  part.codes = rows_of_matrix(q.codes, stored);
  const int64_t block = info(shape.format.kind).block;
  if (block == 0 || q.scales.rank == 0) return part;
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

/// The codes in a window of an expert's, which begins at a block or lies in one, and their scales.
inline QuantizedExpert window_of(const QuantizedShape& shape, QuantizedExpert part,
                                 const Window& w) {
  const BlockExtent block = block_extent(shape.format, shape.axis, part.codes);
  part.codes = window_of(part.codes, w);
  if (part.scales.rank != 0)
    part.scales =
        window_of(part.scales, {w.row / block.rows, w.col / block.cols,
                                ceil_div(w.rows, block.rows), ceil_div(w.cols, block.cols)});
  return part;
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

/// Of a decoded copy whose transformed blocks lie without gaps: where each expert's begin.
inline void write_block_offsets(const QuantizedShape& shape, const Offsets& offsets, int32_t* to) {
  int64_t end = 0;
  schedule::ExpertWalk walk(offsets.data, shape.experts, shape.rows);
  for (*to = 0; walk.next(); *++to = int32_t(end))
    end += code_rows(true, {0, walk.rows().count()}, 0).count;
}

/// One expert's rows of what is to be quantised.
struct ExpertSource {
  TensorView matrix;             ///< those rows, or the tokens that they are gathered from
  int64_t rows = 0;              ///< of the expert
  schedule::RowTokens tokens{};  ///< from its first row on

  /// The row of the matrix that row i of the expert is; -1: it has zeros.
  int64_t row(int64_t i) const { return tokens.gather() ? tokens.token_of(i) : i; }
};

inline ExpertSource source_of(const QuantizeProblem& p, const QuantizeArgs& args, int expert,
                              schedule::ExpertRows rows) {
  if (p.gather)
    return {args.source,
            rows.count(),
            {args.slot_of + rows.first, uint32_t(p.tokens * p.top_k), uint32_t(p.top_k)}};
  if (p.kind == RowsKind::kRagged)
    return {rows_of_matrix(args.source, {rows.first, rows.count()}), rows.count()};
  TensorView v = matrix_of(args.source, p.discrete ? 0 : expert);
  if (p.discrete) v.data = const_cast<void*>(args.discrete[expert]);
  return {v, p.rows};
}

}  // namespace cadre::cpu
