#pragma once
#include "cadre/grouped_gemm.h"
#include "cpu/gemm/lines.h"

namespace cadre::cpu::gemm {

/// From line to line of a view, in elements. The stride of a single line says nothing.
inline int64_t line_step(const TensorView& v, Major major) {
  const auto across = size_t(v.rank - (major == Major::kRow ? 2 : 1));
  const auto along = size_t(v.rank - (major == Major::kRow ? 1 : 2));
  return v.shape[across] > 1 ? v.stride[across] : v.shape[along];
}

/// An operand of any format, read as floats; a plain one in either order. A line is what lies
/// contiguous: a row, or a column where the operand is column-major.
///
///   float = code * block scale, rounded once; the expert's scale is left to the epilogue.
class OperandLines {
 public:
  OperandLines(const Operand&, const QuantizedShape&);

  /// The lines of one expert: rows of the weight, rows of codes of all routed rows, or columns.
  class Expert;
  /// `first` is the expert's first row of codes; of use for routed rows only.
  Expert of(int expert, int64_t first) const;

  DType dtype() const { return operand_.codes.dtype; }
  /// True if codes are the numbers themselves.
  bool is_unscaled() const { return block_ == 0; }
  bool is_column_major() const { return column_; }
  /// True if lines of `length` follow each other without gaps.
  bool is_dense(int64_t length) const { return stride_ == length; }
  /// From line to line, in elements.
  int64_t step() const { return stride_; }

 private:
  const Operand& operand_;
  QuantizedShape shape_;
  int64_t block_;
  bool down_, across_;  ///< a scale serves several rows; several columns
  bool column_;
  int64_t stride_;  ///< of a line, in elements
  DecodeLine decode_, decode_scales_ = nullptr;
  DecodeColumns decode_columns_;
};

class OperandLines::Expert {
 public:
  /// Elements [from, from + count) of line `index`.
  void read(int64_t index, int64_t from, int64_t count, float* to) const {
    lines_.decode_(address(index), from, count, to);
    if (lines_.block_ != 0) scale(index, {from, count}, to);
  }
  /// Elements [from, from + 64 * columns) of lines from `index` on; false if there is no way to do
  /// that faster than line by line.
  bool read_columns(int64_t index, int64_t from, const Columns& all, float* to) const;
  /// Where a line's codes begin.
  const char* address(int64_t index) const { return codes_ + index * line_bytes_; }

 private:
  friend class OperandLines;
  struct Piece {
    int64_t from, count;
  };
  Expert(const OperandLines& lines, int expert, int64_t first);
  void scale(int64_t index, Piece, float* x) const;
  int64_t scale_row(int64_t index) const;

  const OperandLines& lines_;
  int64_t first_, first_block_ = 0;
  const char* codes_;
  const char* scales_ = nullptr;
  int64_t line_bytes_;
};

}  // namespace cadre::cpu::gemm
