#pragma once
#include <array>
#include <ostream>

#include "cadre/tensor.h"

namespace cadre::ops {

/// The shape and order that a view must have; its last two dimensions are a matrix.
struct MatrixLayout {
  DType dtype = DType::kF32;
  std::array<int64_t, 3> shape{};
  int rank = 2;
  Major major = Major::kRow;

  friend std::ostream& operator<<(std::ostream& out, const MatrixLayout& layout) {
    out << name(layout.dtype) << '[';
    for (int d = 0; d < layout.rank; ++d) out << (d ? ", " : "") << layout.shape[size_t(d)];
    return out << ']';
  }
};

inline MatrixLayout layout_of(const TensorView& v, Major major) {
  return {v.dtype, {v.shape[0], v.shape[1], v.shape[2]}, v.rank, major};
}

/// True if the inner dimension has stride 1 and the others do not overlap; of a dimension of one
/// the stride says nothing, nor does that of experts that have pointers.
inline bool is_laid_out(const TensorView& v, Major major, bool discrete) {
  const int inner = major == Major::kRow ? v.rank - 1 : v.rank - 2;
  const int outer = major == Major::kRow ? v.rank - 2 : v.rank - 1;
  const bool one = v[inner] <= 1 || v.stride[inner] == 1;
  const bool rows = v[outer] <= 1 || v.stride[outer] >= v[inner];
  const int64_t matrix = v[outer] <= 1 ? v[outer] * v[inner] : v.stride[outer] * v[outer];
  const bool experts = discrete || v.rank == 2 || v[0] <= 1 || v.stride[0] >= matrix;
  return one && rows && experts;
}

}  // namespace cadre::ops
