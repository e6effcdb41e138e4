#pragma once
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "cadre/dtype.h"

#pragma GCC visibility push(default)
namespace cadre {

/// A strided, non-owning view of up to four dimensions. Strides count elements, as int64. Const or
/// not is a matter of the operation: its header says which views it writes.
struct TensorView {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> stride{};  ///< in elements

  explicit operator bool() const { return data != nullptr; }
  int64_t operator[](int dim) const { return shape[size_t(dim)]; }
};

/// Which of the last two dimensions of a view has stride 1.
enum class Major : uint8_t { kRow, kColumn };

/// A contiguous row-major view; the last dimension has stride 1.
/// Errors    InvalidArgument for more than four dimensions, and for 2^63 elements or more.
TensorView view(const void* data, DType, std::initializer_list<int64_t> shape);

/// A view with strides in elements, of the same length as `shape`.
TensorView view(const void* data, DType, std::initializer_list<int64_t> shape,
                std::initializer_list<int64_t> stride);

/// The same elements with the last two dimensions exchanged.
/// Errors    InvalidArgument for a view of fewer than two.
TensorView transposed(TensorView);

/// Number of elements; INT64_MAX where there are more.
int64_t elements(const TensorView&);

/// True if the elements lie row-major without gaps; dimensions of length 1 may have any stride.
bool is_contiguous(const TensorView&);

/// "bf16[4096, 2048]", with "strides (4096, 1)" behind it where the view is not contiguous.
std::string to_string(const TensorView&);

}  // namespace cadre
#pragma GCC visibility pop
