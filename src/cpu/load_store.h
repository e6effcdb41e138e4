#pragma once
#include <cstdint>
#include <cstring>

#include "cadre/error.h"
#include "cadre/tensor.h"
#include "cpu/threads.h"
#include "formats/bf16.h"
#include "formats/fp16.h"
#include "formats/fp32.h"

// How the CPU reads and writes f32, bf16 and f16. Fast code visits the dtype once and loops over
// typed pointers; reference code reads and writes element by element in double.
namespace cadre::cpu {

/// Calls `work` with the format of a plain dtype: formats::Fp32{}, Bf16{} or Fp16{}.
///
///   visit_float(z.dtype, [&](auto format) { rows<decltype(format)>(z); });
template <class Work>
void visit_float(DType dtype, Work&& work) {
  switch (dtype) {
    case DType::kF32:
      return work(formats::Fp32{});
    case DType::kBf16:
      return work(formats::Bf16{});
    case DType::kF16:
      return work(formats::Fp16{});
    default:
      throw InvalidArgument(text("cpu: dtype is ", name(dtype), ", must be f32, bf16 or f16"));
  }
}

/// The stored elements of one row of a matrix whose last dimension has stride 1.
template <class Float>
typename Float::Code* row_data(const TensorView& matrix, int64_t row) {
  return static_cast<typename Float::Code*>(matrix.data) + row * matrix.stride[0];
}

/// `count` elements of a row, `step` apart, from the element `at` on.
struct Run {
  int64_t at = 0, step = 1;
  int count = 0;
};

/// Reads a run into floats, or rounds floats into a run. Chosen once by dtype, so that code between
/// a load and a store of some dozen elements is compiled once and not for every pair of dtypes.
using LoadRun = void (*)(const void* data, Run, float* to);
using StoreRun = void (*)(void* data, Run, const float* from);
LoadRun load_run(DType);
StoreRun store_run(DType);

/// The address of a row in a matrix whose last dimension has stride 1.
inline void* row_address(const TensorView& matrix, int64_t row) {
  return static_cast<char*>(matrix.data) + bytes_for(matrix.dtype, row * matrix.stride[0]);
}

/// The same where rows lie in the memories of several ranks: of [P, R, C] the row of P * R.
inline void* rank_row_address(const TensorView& v, int64_t row) {
  if (v.rank < 3) return row_address(v, row);
  const int64_t at = row / v.shape[1] * v.stride[0] + row % v.shape[1] * v.stride[1];
  return static_cast<char*>(v.data) + bytes_for(v.dtype, at);
}

/// Writes a row as zero. In every plain float zero is all bits zero.
inline void zero_row(const TensorView& matrix, int64_t row) {
  std::memset(row_address(matrix, row), 0, size_t(bytes_for(matrix.dtype, matrix[1])));
}

inline void zero_rows(const TensorView& matrix, int64_t first, int64_t last) {
#pragma omp parallel for schedule(static) if (worth_threads((last - first) * matrix[1]))
  for (int64_t r = first; r < last; ++r) zero_row(matrix, r);
}

/// One element in double, at any strides; exact.
inline double read(const TensorView& v, int64_t i, int64_t j = 0, int64_t k = 0) {
  const int64_t at = i * v.stride[0] + j * v.stride[1] + k * v.stride[2];
  double value = 0;
  visit_float(v.dtype, [&]<class Float>(Float) {
    value = Float::decode(static_cast<const typename Float::Code*>(v.data)[at]);
  });
  return value;
}

/// Where `write` puts an element of a view of rank 1 to 3.
struct At {
  int64_t i = 0, j = 0, k = 0;
};

/// Stores one element, rounded once from double, at any strides.
inline void write(const TensorView& v, At at, double value) {
  const int64_t index = at.i * v.stride[0] + at.j * v.stride[1] + at.k * v.stride[2];
  visit_float(v.dtype, [&]<class Float>(Float) {
    static_cast<typename Float::Code*>(v.data)[index] = Float::encode(value);
  });
}

}  // namespace cadre::cpu
