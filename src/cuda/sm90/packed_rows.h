#pragma once
#include "cadre/format.h"
#include "cuda/sm90/ragged_rows.h"
#include "cuda/sm90/split_columns.h"

namespace cadre::cuda::sm90 {

constexpr int kPackedDepth = 64;  ///< columns of w that are decoded together

/// How wide tiles are: for many rows an expert, few, or, of four-bit weights, fewer.
enum class PackedWidth { kWide, kNarrow, kNarrowest };

/// Rows of y in one box.
constexpr int packed_part(DType out, PackedWidth width) {
  return width == PackedWidth::kWide ? rows_of_part(out) : 32;
}

/// Block scales of the weights. Steps are bytes.
struct PackedScales {
  const void* data = nullptr;
  const void* const* discrete = nullptr;  ///< [E]
  int64_t step = 0, row_step = 0, col_step = 0;
  int rows = 1;      ///< of w that share one
  int cols = 0;      ///< blocks along the contraction
  int together = 1;  ///< so many of them, 1, 2 or 4, are an aligned word wherever one begins
};

/// What the kernel of packed weights is launched with: w are codes.
struct PackedRowsParams : RaggedRowsParams {
  PackedScales w_scales{};
};

constexpr ColumnOrder column_order(DType codes, PackedWidth width, bool split) {
  if (!split) return ColumnOrder::kPlain;
  const bool by_table = width != PackedWidth::kWide && codes == DType::kE2m1;
  return by_table ? ColumnOrder::kPairs : ColumnOrder::kSplit;
}

/// Which instance: the format of w, the type of the output, how wide its tiles are, and whether the
/// columns of x are in another order, see split_columns.h. In narrow tiles they are; there is none
/// of either that writes floats.
struct PackedRowsKind {
  FormatKind weights = FormatKind::kMxfp4;
  DType out = DType::kBf16;
  PackedWidth width = PackedWidth::kWide;
  bool split = width != PackedWidth::kWide;

  bool operator==(const PackedRowsKind&) const = default;
};

/// One instance, launched; instances/ has them, by format and output.
template <PackedRowsKind kKind>
void launch_packed_rows(const PackedRowsParams&, int blocks, cudaStream_t);

}  // namespace cadre::cuda::sm90
