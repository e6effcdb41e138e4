#pragma once
#include "cadre/format.h"
#include "cuda/sm90/ragged_rows.h"

namespace cadre::cuda::sm90 {

constexpr int kPackedDepth = 64;  ///< columns of w that are decoded together

/// How wide tiles are: for many rows an expert, some (of blocks of 32, whose scales leave registers
/// for it), few, or fewer.
enum class PackedWidth { kWide, kMiddle, kNarrow, kNarrowest };

/// How codes become numbers: by their bits, of which x may have its columns split, see
/// split_columns.h; or by a table, of two four-bit codes at once.
enum class Decoding { kPlain, kSplit, kTable };

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

  CADRE_HD const char* of(int expert) const {
    return static_cast<const char*>(discrete != nullptr ? discrete[expert] : data) +
           (discrete != nullptr ? 0 : expert * step);
  }
  /// Bytes from there to those of a row of w.
  CADRE_HD int64_t row_at(int row) const { return row / rows * row_step; }
};

/// What the kernel of packed weights is launched with: w are codes.
struct PackedRowsParams : RaggedRowsParams {
  PackedScales w_scales{};
};

/// Which instance: the format of w, the type of the output, how wide its tiles are, and how codes
/// are decoded. In narrow tiles four-bit codes are by a table, and of 8-bit codes the columns of x
/// are split, which they may be in wide tiles too. None of these writes floats.
struct PackedRowsKind {
  FormatKind weights = FormatKind::kMxfp4;
  DType out = DType::kBf16;
  PackedWidth width = PackedWidth::kWide;
  Decoding decoding = Decoding::kPlain;

  bool operator==(const PackedRowsKind&) const = default;
};

/// One instance, launched; instances/ has them, by format and output.
template <PackedRowsKind kKind>
void launch_packed_rows(const PackedRowsParams&, int blocks, cudaStream_t);

}  // namespace cadre::cuda::sm90
