#include "cpu/reference/operand.h"

#include "formats/list.h"

namespace cadre::cpu::reference {
namespace {

/// The matrix [rows, cols] of one expert's codes or scales.
struct Part {
  const void* data;
  DType dtype;
  int64_t row_stride, col_stride;
};

Part part_of(const TensorView& v, const void* const* discrete, int expert) {
  const int rows = v.rank - 2, cols = v.rank - 1;
  const int64_t first = v.rank == 3 && discrete == nullptr ? expert * v.stride[0] : 0;
  const char* data = static_cast<const char*>(discrete ? discrete[expert] : v.data);
  return {data + first * bits(v.dtype) / 8, v.dtype, v.stride[rows], v.stride[cols]};
}

double element(const Part& part, int64_t i, int64_t j) {
  const int64_t at = i * part.row_stride + j * part.col_stride;
  double value = 0;
  if (part.dtype == DType::kE8m0)
    return formats::E8m0::decode(static_cast<const uint8_t*>(part.data)[at]);
  formats::visit(formats::Elements{}, part.dtype, [&]<class Element>() {
    const auto* codes = static_cast<const typename Element::Code*>(part.data);
    if constexpr (Element::kDType == DType::kE2m1)
      value = Element::decode(formats::nibble(codes[at / 2], at));
    else
      value = Element::decode(codes[at]);
  });
  return value;
}

/// Where the scale of the element [i, j] of `codes` stands.
struct ScaleOf {
  const QuantizedShape& shape;
  CodeRows codes;
  int expert;

  int64_t row(int64_t i) const {
    const int64_t block = info(shape.format.kind).block;
    const bool down = shape.format.square || shape.axis == Axis::kAlongRows;
    if (!down) return codes.first + i;
    if (shape.kind == RowsKind::kWeights) return i / block;
    if (is_transformed(shape.format, shape.axis)) return (codes.first + i) / block;
    return first_block(codes.first, expert, block) + i / block;
  }
  int64_t col(int64_t j) const {
    const bool across = shape.format.square || shape.axis == Axis::kAlongK;
    return across ? j / info(shape.format.kind).block : j;
  }
};

}  // namespace

Matrix decode(const Operand& operand, const QuantizedShape& shape, int expert, CodeRows rows) {
  const FormatInfo& row = info(shape.format.kind);
  const Part codes = part_of(operand.codes, operand.discrete, expert);
  const double factor = row.has_expert_scale ? operand.expert_scale[expert] : 1.0;
  const ScaleOf scale{shape, rows, expert};
  Matrix m{rows.count, shape.cols, std::vector<double>(size_t(rows.count * shape.cols), factor)};
  for (int64_t i = 0; i < m.rows; ++i)
    for (int64_t j = 0; j < m.cols; ++j) m.at(i, j) *= element(codes, rows.first + i, j);
  if (row.block == 0) return m;
  const Part scales = part_of(operand.scales, operand.discrete_scales, expert);
  for (int64_t i = 0; i < m.rows; ++i)
    for (int64_t j = 0; j < m.cols; ++j) m.at(i, j) *= element(scales, scale.row(i), scale.col(j));
  return m;
}

}  // namespace cadre::cpu::reference
