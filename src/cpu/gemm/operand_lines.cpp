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

OperandLines::OperandLines(const Operand& operand, const QuantizedShape& shape)
    : operand_(operand),
      shape_(shape),
      block_(info(shape.format.kind).block),
      down_(shape.format.square || shape.axis == Axis::kAlongRows),
      across_(shape.format.square || shape.axis == Axis::kAlongK),
      column_(shape.codes_major == Major::kColumn),
      stride_(line_step(operand.codes, column_ ? Major::kColumn : Major::kRow)),
      decode_(decode_line(operand.codes.dtype)),
      decode_columns_(decode_columns(operand.codes.dtype)) {
  if (block_ != 0) decode_scales_ = decode_line(operand.scales.dtype);
}

OperandLines::Expert OperandLines::of(int expert, int64_t first) const {
  return {*this, expert, first};
}

OperandLines::Expert::Expert(const OperandLines& lines, int expert, int64_t first)
    : lines_(lines),
      first_(first),
      codes_(expert_data(lines.operand_.codes, lines.operand_.discrete, expert)),
      line_bytes_(bytes_for(lines.dtype(), lines.stride_)) {
  if (lines.block_ == 0) return;
  scales_ = expert_data(lines.operand_.scales, lines.operand_.discrete_scales, expert);
  first_block_ = first_block(first, expert, lines.block_);
}

bool OperandLines::Expert::read_columns(int64_t index, int64_t from, const Columns& all,
                                        float* to) const {
  if (lines_.decode_columns_ == nullptr) return false;
  Columns with_step = all;
  with_step.line_bytes = line_bytes_;
  lines_.decode_columns_(address(index) + bytes_for(lines_.dtype(), from), with_step, to);
  return true;
}

int64_t OperandLines::Expert::scale_row(int64_t index) const {
  if (!lines_.down_) return index;
  const QuantizedShape& shape = lines_.shape_;
  if (shape.kind == RowsKind::kWeights || is_transformed(shape.format, shape.axis))
    return index / lines_.block_;
  return first_block_ + (index - first_) / lines_.block_;
}

void OperandLines::Expert::scale(int64_t index, Piece piece, float* x) const {
  constexpr int64_t kPiece = 128;
  float factors[kPiece];
  const TensorView& v = lines_.operand_.scales;
  const char* scales =
      scales_ + bytes_for(v.dtype, scale_row(index) * v.stride[size_t(v.rank - 2)]);
  const auto [from, count] = piece;
  if (!lines_.across_) {
    for (int64_t at = 0; at < count; at += kPiece) {
      const int64_t some = std::min(kPiece, count - at);
      lines_.decode_scales_(scales, from + at, some, factors);
      multiply_line(x + at, factors, some);
    }
    return;
  }
  for (int64_t at = 0; at < count;) {
    const int64_t here = (from + at) / lines_.block_;
    const int64_t some = std::min((here + 1) * lines_.block_ - (from + at), count - at);
    lines_.decode_scales_(scales, here, 1, factors);
    scale_line(x + at, some, factors[0]);
    at += some;
  }
}

}  // namespace cadre::cpu::gemm
