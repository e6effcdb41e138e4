#pragma once
#include <cstdint>
#include <optional>
#include <string_view>

#include "cadre/format.h"
#include "ops/checks.h"

// Rows that are moved as codes and scales: what permute and the exchanges check of them.
namespace cadre::ops {

/// Scales of a row of so many codes along K.
inline int64_t scales_of_row(const Format& format, int64_t columns) {
  const int64_t block = info(format.kind).block;
  return (columns + block - 1) / block;
}

/// The type of what moves: codes of a format, if there is one, else numbers.
inline DType moved_dtype(const std::optional<Format>& format, DType dtype) {
  return format ? format->element : dtype;
}

/// A row goes anywhere by itself, so its scales must be its own.
template <class Problem>
void check_moved_format(const Checks<Problem>& checks, std::string_view field,
                        const std::optional<Format>& format, Major scales_major, int64_t columns) {
  if (!format)
    return checks.holds(scales_major == Major::kRow,
                        "scales_major is column, must be row; there is no ", field);
  require_legal(*format);
  const FormatInfo& of = info(format->kind);
  const bool is_own =
      of.block != 0 && !of.has_expert_scale && !format->square && bits(format->element) == 8;
  const std::string name = to_string(*format);
  checks.holds(
      is_own, field, " is ", name,
      ", must be fp8_row, fp8_block or mxfp8, without 2d; codes of a byte whose scales are "
      "of one row");
  const bool is_fp32 = of.scale == DType::kF32;
  const int64_t unit = is_fp32 ? 2 : 2 * int64_t(of.block);
  checks.holds(columns % unit == 0, "H is ", columns, ", must be a multiple of ", unit, " for ",
               name, "; codes and scales move two bytes at a time");
  checks.holds(scales_major == Major::kRow || is_fp32, "scales_major is column, must be row for ",
               name, "; only fp32 scales lie in columns");
}

/// Rows of a matrix, or of several, that move two bytes at a time.
template <class Problem>
void check_even(const Checks<Problem>& checks, std::string_view what, const TensorView& v) {
  const int64_t element = bits(v.dtype) / 8;
  bool is_even = reinterpret_cast<uintptr_t>(v.data) % 2 == 0;
  for (int d = 0; d + 1 < v.rank; ++d) is_even &= v.stride[d] * element % 2 == 0 || v[d] <= 1;
  checks.holds(is_even, what, " is ", Seen{v}, " at ", v.data,
               ", must have rows at even addresses; they move two bytes at a time");
}

}  // namespace cadre::ops
