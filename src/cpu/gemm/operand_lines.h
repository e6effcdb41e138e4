#pragma once
#include "cadre/grouped_gemm.h"
#include "cpu/gemm/lines.h"

namespace cadre::cpu::gemm {

/// An operand of any format and major order, read as floats. A line is what lies contiguous: a row,
/// or a column where the operand is column-major.
///
///   float = code * block scale, rounded once; the expert's scale is left to the epilogue.
class OperandLines {
 public:
  OperandLines(const Operand&, const QuantizedShape&, Major);

  /// One line of an expert: a row of codes (of the weight, or of all routed rows), or a column.
  struct Line {
    int expert = 0;
    int64_t first = 0;  ///< routed rows: the expert's first row of codes
    int64_t index = 0;
  };

  /// Elements [from, from + count) of a line.
  void read(const Line&, int64_t from, int64_t count, float* to) const;

  /// Where the line's codes begin. Of use to others where codes are values.
  const void* address(const Line&) const;

  DType dtype() const { return operand_.codes.dtype; }
  int64_t line_stride() const { return stride_; }
  bool is_column_major() const { return column_; }

 private:
  void scale(const Line&, int64_t from, int64_t count, float* x) const;
  int64_t scale_row(const Line&) const;

  const Operand& operand_;
  QuantizedShape shape_;
  int64_t block_;
  bool down_, across_;  ///< a scale serves several rows; several columns
  bool column_;
  int64_t stride_;
  DecodeLine decode_, decode_scales_ = nullptr;
};

}  // namespace cadre::cpu::gemm
