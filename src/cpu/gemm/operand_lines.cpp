#include "cpu/gemm/operand_lines.h"

#include <algorithm>

namespace cadre::cpu::gemm {
namespace {

/// The first code or scale of an expert; routed rows have one matrix for all experts.
const char* expert_data(const TensorView& v, const void* const* discrete, int expert) {
  if (discrete != nullptr) return static_cast<const char*>(discrete[expert]);
  const int64_t first = v.rank == 3 ? expert * v.stride[0] : 0;
  return static_cast<const char*>(v.data) + bytes_for(v.dtype, first);
}

}  // namespace

OperandLines::OperandLines(const Operand& operand, const QuantizedShape& shape, Major major)
    : operand_(operand),
      shape_(shape),
      block_(info(shape.format.kind).block),
      down_(shape.format.square || shape.axis == Axis::kAlongRows),
      across_(shape.format.square || shape.axis == Axis::kAlongK),
      column_(major == Major::kColumn),
      stride_(operand.codes.stride[size_t(operand.codes.rank - (column_ ? 1 : 2))]),
      decode_(decode_line(operand.codes.dtype)) {
  if (block_ != 0) decode_scales_ = decode_line(operand.scales.dtype);
}

const void* OperandLines::address(const Line& line) const {
  return expert_data(operand_.codes, operand_.discrete, line.expert) +
         bytes_for(dtype(), line.index * stride_);
}

void OperandLines::read(const Line& line, int64_t from, int64_t count, float* to) const {
  decode_(address(line), from, count, to);
  if (block_ != 0) scale(line, from, count, to);
}

int64_t OperandLines::scale_row(const Line& line) const {
  if (!down_) return line.index;
  if (shape_.kind == RowsKind::kWeights || is_transformed(shape_.format, shape_.axis))
    return line.index / block_;
  return first_block(line.first, line.expert, block_) + (line.index - line.first) / block_;
}

void OperandLines::scale(const Line& line, int64_t from, int64_t count, float* x) const {
  constexpr int64_t kPiece = 128;
  float factors[kPiece];
  const TensorView& v = operand_.scales;
  const char* scales = expert_data(v, operand_.discrete_scales, line.expert) +
                       bytes_for(v.dtype, scale_row(line) * v.stride[size_t(v.rank - 2)]);
  if (!across_) {
    for (int64_t at = 0; at < count; at += kPiece) {
      const int64_t some = std::min(kPiece, count - at);
      decode_scales_(scales, from + at, some, factors);
      multiply_line(x + at, factors, some);
    }
    return;
  }
  for (int64_t at = 0; at < count;) {
    const int64_t here = (from + at) / block_;
    const int64_t some = std::min((here + 1) * block_ - (from + at), count - at);
    decode_scales_(scales, here, 1, factors);
    scale_line(x + at, some, factors[0]);
    at += some;
  }
}

}  // namespace cadre::cpu::gemm
