#pragma once
#include <cuda.h>

#include "cadre/tensor.h"

// Tensor maps: the descriptors by which TMA finds boxes of a tensor. Encoded on the host for every
// launch, from pointers and strides alone: nothing is kept, since parameters move.
namespace cadre::cuda {

/// Columns of a box; each of its rows is 128 bytes of shared memory, swizzled.
inline int box_columns(DType dtype) { return 1024 / bits(dtype); }

/// A row-major matrix [R, C] of rows that belong to experts. The box of `rows` rows that begins at
/// row r of the expert with rows [last - count, last), and at column c, is at
/// {c, 2^30 - count + r, last, 2^30}. Rows beyond the expert's last are read as zeros and not
/// written: the third and fourth coordinates move the first row by `last` and by minus 2^30, whose
/// strides add up to 2^64 and vanish, and the second stops at 2^30.
CUtensorMap ragged_map(const TensorView&, int rows);
constexpr int kRaggedOrigin = 1 << 30;

/// A row-major matrix [R, C], or one an expert, [E, R, C]. The box at {c, r, e}. Column-major views
/// count as their transposes.
CUtensorMap expert_map(const TensorView&, int rows);

}  // namespace cadre::cuda
