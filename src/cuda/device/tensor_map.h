#pragma once
#include <cuda.h>

#include "cadre/activation_kind.h"
#include "cadre/tensor.h"

// Tensor maps: the descriptors by which TMA finds boxes of a tensor. Encoded on the host for every
// launch, from pointers and strides alone: nothing is kept, since parameters move.
namespace cadre::cuda {

/// Columns of a box, unless it is asked for fewer; each of its rows is 128 bytes of shared memory,
/// or 64 or 32, swizzled.
inline int box_columns(DType dtype) { return 1024 / bits(dtype); }

/// A row-major matrix [R, C] of rows that belong to experts. The box of `rows` rows that begins at
/// row r of the expert with rows [last - count, last), and at column c, is at
/// {c, 2^30 - count + r, last, 2^30}. Rows beyond the expert's last are read as zeros and not
/// written: the third and fourth coordinates move the first row by `last` and by minus 2^30, whose
/// strides add up to 2^64 and vanish, and the second stops at 2^30. A box has `columns`: as many as
/// fill 128 bytes, or a half or a quarter of them.
CUtensorMap ragged_map(const TensorView&, int rows, int columns = 0);
constexpr int kRaggedOrigin = 1 << 30;

/// A row-major matrix [R, C], or one an expert, [E, R, C]. The box at {c, r, e}, where c counts
/// bytes of 4-bit codes. Column-major views count as their transposes.
CUtensorMap expert_map(const TensorView&, int rows, int columns = 0);

/// The weight [2F, C] of a gated activation, or one an expert, [E, 2F, C]; F is a multiple of 8. A
/// box has 128 of its rows, of 64 features, in turns of eight: gate 0 to 7, up 0 to 7, gate 8 to
/// 15, ... The box of features from f on is at {c, 0, 0, f / 8, e}. Interleaved by 32, blocks take
/// the last dimension, and the box is at {c, 0, 0, 0, f / 32}: experts have a map each.
CUtensorMap glu_map(const TensorView&, GluLayout);

}  // namespace cadre::cuda
