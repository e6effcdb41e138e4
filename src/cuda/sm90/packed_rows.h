#pragma once
#include "cadre/format.h"
#include "cuda/sm90/ragged_rows.h"

namespace cadre::cuda::sm90 {

constexpr int kPackedDepth = 64;  ///< columns of w that are decoded together

/// Of w in one load.
constexpr int packed_depth(DType codes, bool few) {
  return !few ? kDepthOfPacked : codes == DType::kE2m1 ? kDepthOfFewNibbles : kDepthOfFewBytes;
}

/// Rows of y in one box.
constexpr int packed_part(DType out, bool few) { return few ? 32 : rows_of_part(out); }

/// Block scales of the weights. Steps are bytes.
struct PackedScales {
  const void* data = nullptr;
  const void* const* discrete = nullptr;  ///< [E]
  int64_t step = 0, row_step = 0, col_step = 0;
  int rows = 1;  ///< of w that share one
  int cols = 0;  ///< blocks along the contraction
};

/// What the kernel of packed weights is launched with: w are codes.
struct PackedRowsParams : RaggedRowsParams {
  PackedScales w_scales{};
};

/// Which instance: the format of w, the type of the output, whether experts have few rows, and
/// whether the columns of x are split, see split_columns.h. Where rows are few they are; there is
/// none of either that writes floats.
struct PackedRowsKind {
  FormatKind weights = FormatKind::kMxfp4;
  DType out = DType::kBf16;
  bool few = false, split = few;

  bool operator==(const PackedRowsKind&) const = default;
};

/// One instance, launched; instances/ has them, by format and output.
template <PackedRowsKind kKind>
void launch_packed_rows(const PackedRowsParams&, int blocks, cudaStream_t);

}  // namespace cadre::cuda::sm90
