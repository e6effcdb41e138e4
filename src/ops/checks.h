#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <ostream>
#include <string>
#include <string_view>

#include "cadre/dtype.h"
#include "cadre/error.h"
#include "cadre/offsets.h"
#include "cadre/tensor.h"

namespace cadre::ops {

using Shape = std::initializer_list<int64_t>;

/// What a tensor may have. Bytes, sums and padded sizes of so many elements fit in 64 bits.
inline constexpr int64_t kMostElements = int64_t{1} << 44, kExpertsBelow = int64_t{1} << 24;

/// Whether a tensor of these lengths has no more elements; lengths of 0 count as 1.
inline bool is_countable(Shape lengths) {
  int64_t left = kMostElements;
  for (const int64_t length : lengths) left /= std::max<int64_t>(length, 1);
  return left > 0;
}

/// Why a value must be what it must be, or what to do; may be empty.
struct Why {
  std::string_view words;

  constexpr Why() = default;
  constexpr Why(const char* given) : words(given) {}

  friend std::ostream& operator<<(std::ostream& out, Why why) {
    return why.words.empty() ? out : out << "; " << why.words;
  }
};

/// Views as words, put together only when they are printed.
struct Seen {
  const TensorView& view;

  friend std::ostream& operator<<(std::ostream& out, const Seen& seen) {
    return out << to_string(seen.view);
  }
};
/// Lengths as "4 * 16".
struct Product {
  Shape lengths;

  friend std::ostream& operator<<(std::ostream& out, const Product& product) {
    for (const int64_t& length : product.lengths)
      out << (&length == product.lengths.begin() ? "" : " * ") << length;
    return out;
  }
};
struct Wanted {
  DType dtype;
  Shape shape;

  friend std::ostream& operator<<(std::ostream& out, const Wanted& wanted) {
    out << name(wanted.dtype) << '[';
    for (const int64_t& length : wanted.shape)
      out << (&length == wanted.shape.begin() ? "" : ", ") << length;
    return out << ']';
  }
};

/// The checks that every operation makes, with one form of message:
///
///   `<op>: <what> is <value>, must be <value or condition>; <why or what to do> [<problem>]`
///
/// Nothing is formatted, and nothing allocates, unless a check fails.
template <class Problem>
class Checks {
 public:
  Checks(std::string_view op, const Problem& problem) : op_(op), problem_(problem) {}

  /// Throws InvalidArgument with the joined parts unless `good`.
  template <class... Parts>
  void holds(bool good, const Parts&... parts) const {
    if (!good) throw InvalidArgument(text(op_, ": ", parts..., " [", to_string(problem_), "]"));
  }

  void at_least(std::string_view what, int64_t value, int64_t low, Why why = {}) const {
    holds(value >= low, what, " is ", value, ", must be ", low, " or more", why);
  }

  void alignment(std::string_view what, int64_t bytes) const {
    holds(bytes > 0 && (bytes & (bytes - 1)) == 0, what, " is ", bytes,
          ", must be a power of two; it counts bytes");
  }

  /// Rows and choices are numbered in int32.
  void fits_int32(std::string_view what, int64_t value) const {
    holds(value <= std::numeric_limits<int32_t>::max(), what, " is ", value,
          ", must be below 2^31; rows are numbered in int32");
  }

  void experts(int64_t value) const {
    at_least("E", value, 1);
    holds(value < kExpertsBelow, "E is ", value, ", must be below 2^24");
  }

  /// A tensor of these lengths.
  void countable(std::string_view what, Shape lengths) const {
    holds(is_countable(lengths), what, " is ", Product{lengths},
          ", must be at most 2^44; no tensor has more elements");
  }

  /// The same of a view's strides, before anything is multiplied by them; those of dimensions that
  /// have one element or none too, since bytes are made of them.
  void reachable(std::string_view what, const TensorView& v) const {
    bool near = true;
    for (int d = 0; d < v.rank; ++d) {
      int64_t step = 0;
      near = !__builtin_mul_overflow(std::max<int64_t>(v.shape[d], 1), v.stride[d], &step) &&
             step <= kMostElements && step >= -kMostElements && near;
    }
    holds(near, what, " is ", Seen{v}, ", must have strides that reach 2^44 elements at most");
  }

  void plain_float(std::string_view what, DType dtype) const {
    holds(is_plain_float(dtype), what, " is ", name(dtype), ", must be f32, bf16 or f16");
  }

  /// Shape, dtype and alignment; the last dimension contiguous, rows apart by their length or more.
  /// A view without elements may have null data.
  void view(std::string_view what, const TensorView& v, DType dtype, Shape shape,
            Why why = {}) const {
    shaped(what, v, {dtype, shape}, why);
    holds(is_row_major(v), what, " is ", Seen{v},
          ", must have rows of stride 1 that do not overlap; make it contiguous");
    aligned(what, v.data, bits(dtype) / 8);
  }

  /// The same for a matrix, or one an expert, whose columns are contiguous.
  void column_view(std::string_view what, const TensorView& v, DType dtype, Shape shape) const {
    shaped(what, v, {dtype, shape}, {});
    holds(is_row_major(transposed(v)), what, " is ", Seen{v},
          ", must have columns of stride 1 that do not overlap; transpose it");
    aligned(what, v.data, bits(dtype) / 8);
  }

  /// Rows of elements of 4 bits start at a byte, or columns where these are contiguous.
  void whole_bytes(std::string_view what, const TensorView& v, Major major) const {
    if (bits(v.dtype) != 4) return;
    const bool row = major == Major::kRow;
    for (int d = 0; d < v.rank; ++d)
      holds(d == v.rank - (row ? 1 : 2) || v.stride[d] % 2 == 0 || v[d] <= 1, what, " is ", Seen{v},
            ", must have even strides; a ", row ? "row" : "column", " of nibbles starts at a byte");
  }

  /// An argument that this problem has no use for.
  void absent(std::string_view what, const void* pointer, Why why) const {
    holds(pointer == nullptr, what, " is given, must be null", why);
  }
  void absent(std::string_view what, const TensorView& v, Why why) const {
    absent(what, v.data, why);
  }

  /// A typed array that this problem needs. It may be null where it has no elements.
  template <class Element>
  void present(std::string_view what, const Element* pointer, int64_t count, Why why = {}) const {
    holds(pointer != nullptr || count == 0, what, " is null, must point to ", count,
          count == 1 ? " element" : " elements", why);
    aligned(what, pointer, alignof(Element));
  }

  void offsets(const Offsets& given, int experts) const {
    holds(given.experts == experts, "offsets.experts is ", given.experts, ", must be ", experts,
          "; the experts of the problem");
    present("offsets.data", given.data, int64_t(experts) + 1);
  }

  void aligned(std::string_view what, const void* pointer, int64_t bytes) const {
    holds(reinterpret_cast<uintptr_t>(pointer) % uintptr_t(std::max<int64_t>(bytes, 1)) == 0, what,
          " is at ", pointer, ", must be aligned to ", bytes, " bytes");
  }

  const Problem& problem() const { return problem_; }

 private:
  void shaped(std::string_view what, const TensorView& v, const Wanted& want, Why why) const {
    holds(v.dtype == want.dtype && same_shape(v, want.shape), what, " is ", Seen{v}, ", must be ",
          want, why);
    reachable(what, v);
    holds(v.data != nullptr || elements(v) == 0, what, " is null, must be ", Seen{v}, why);
  }
  static bool same_shape(const TensorView& v, Shape shape) {
    return v.rank == int(shape.size()) && std::equal(shape.begin(), shape.end(), v.shape.begin());
  }
  static bool is_row_major(const TensorView& v) {
    int64_t step = 1;
    for (int d = v.rank - 1; d >= 0; --d) {
      if (v.shape[d] == 1) continue;
      const bool good = d == v.rank - 1 ? v.stride[d] == 1 : v.stride[d] >= step;
      if (!good) return false;
      step = v.stride[d] * v.shape[d];
    }
    return true;
  }

  std::string_view op_;
  const Problem& problem_;
};

}  // namespace cadre::ops
