#pragma once
#include "cuda/sm90/ragged_rows.h"

namespace cadre::cuda::sm90 {

/// Columns of a tile: rows of w, which come in two boxes.
constexpr int cols_of_codes(DType out) {
  return out == DType::kF32 ? kColsOfCodesToFloats : kColsOfCodes;
}

/// What the kernel of products of 8-bit codes is launched with: x and w are codes.
struct Fp8RowsParams : RaggedRowsParams {
  const float* x_scales = nullptr;  ///< [D / 128, R], of rows side by side; or [E]; or [R]
  int64_t x_scale_step = 0;         ///< from a block, or a row that has one scale, to the next
  Plain w_scales{};                 ///< [E, C / 128, D / 128]; or [E]; or [E, C]
  int64_t w_scale_row = 0;    ///< from 128 rows of w, or a row that has one scale, to the next
  int64_t w_scale_depth = 0;  ///< from a block of the contraction to the next
};

/// What has a scale: blocks of codes, experts, or rows of both operands.
enum class CodeScales { kOfBlocks, kOfExperts, kOfRows };

/// Which instance: the type of the batch's codes, and that of the output. Codes of w are e4m3.
struct Fp8RowsKind {
  DType in = DType::kE4m3, out = DType::kBf16;
  CodeScales scales = CodeScales::kOfBlocks;

  bool operator==(const Fp8RowsKind&) const = default;
};

/// One instance, launched; instances/ has them, a file each.
template <Fp8RowsKind kKind>
void launch_fp8_rows(const Fp8RowsParams&, int blocks, cudaStream_t);

/// The instance of that kind; null if none was built.
using LaunchFp8Rows = void (*)(const Fp8RowsParams&, int blocks, cudaStream_t);
LaunchFp8Rows find_fp8_rows(const Fp8RowsKind&);

}  // namespace cadre::cuda::sm90
