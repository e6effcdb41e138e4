// How codes and scales lie in memory.
#include <algorithm>

#include "cadre/error.h"
#include "cadre/quantize.h"
#include "ops/checks.h"

namespace cadre {
namespace {

constexpr int64_t kAlignment = 256;
constexpr int kBulkCopyBits = 128;  ///< what a bulk copy of Hopper starts at and takes multiples of

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t aligned(int64_t bytes) { return ceil_div(bytes, kAlignment) * kAlignment; }

/// The lines of stride 1, rows or columns, each of a multiple of so many bits.
struct Lines {
  Major major = Major::kRow;
  int unit_bits = 8;  ///< a line of 4-bit codes starts at a byte
};

TensorView lay_out(DType dtype, std::initializer_list<int64_t> shape, Lines lines) {
  TensorView v = view(nullptr, dtype, shape);
  const bool row = lines.major == Major::kRow;
  const int inner = v.rank - (row ? 1 : 2), outer = v.rank - (row ? 2 : 1);
  const int64_t unit = std::max(lines.unit_bits / bits(dtype), 1);
  v.stride[inner] = 1;
  v.stride[outer] = ceil_div(v[inner], unit) * unit;
  if (v.rank == 3) v.stride[0] = v.stride[outer] * v[outer];
  return v;
}

TensorView codes_of(const QuantizedShape& s) {
  const Lines lines{s.codes_major};
  const DType element = (s.decoded ? decoded_format(s.format) : s.format).element;
  if (s.kind == RowsKind::kWeights) return lay_out(element, {s.experts, s.rows, s.cols}, lines);
  const int64_t rows = code_rows(s.format, s.axis, {s.rows, 0}, s.experts).first;
  return lay_out(element, {rows, s.cols}, lines);
}

TensorView scales_of(const QuantizedShape& s) {
  const FormatInfo& row = info(s.format.kind);
  if (row.block == 0 || s.decoded) return {};
  const bool down = s.format.square || s.axis == Axis::kAlongRows;
  const bool across = s.format.square || s.axis == Axis::kAlongK;
  const int64_t cols = across ? ceil_div(s.cols, row.block) : s.cols;
  const Lines lines{s.scales_major, s.scales_major == Major::kRow ? 8 : kBulkCopyBits};
  if (s.kind == RowsKind::kWeights)
    return lay_out(row.scale, {s.experts, down ? ceil_div(s.rows, row.block) : s.rows, cols},
                   lines);
  return lay_out(row.scale, {down ? first_block(s.rows, s.experts, row.block) : s.rows, cols},
                 lines);
}

/// Bytes from the first element to behind the last.
int64_t bytes_of(const TensorView& v) {
  if (v.rank == 0 || elements(v) == 0) return 0;
  int64_t end = 0;
  for (int d = 0; d < v.rank; ++d) end = std::max(end, v[d] * v.stride[d]);
  return bytes_for(v.dtype, end);
}

int64_t expert_scale_bytes(const QuantizedShape& s) {
  return info(s.format.kind).has_expert_scale ? s.experts * int64_t(sizeof(float)) : 0;
}

int64_t block_offsets_bytes(const QuantizedShape& s) {
  const bool own = s.decoded && is_transformed(s.format, s.axis);
  return own ? (s.experts + 1) * int64_t(sizeof(int32_t)) : 0;
}

/// A shape that is no problem's has been checked by nobody.
void require_countable(const QuantizedShape& s) {
  require_legal(s.format);
  require(s.kind == RowsKind::kRagged || s.kind == RowsKind::kWeights, "quantized_view: kind is ",
          int(s.kind), ", must be rows or weights");
  const bool ragged = s.kind == RowsKind::kRagged;
  const bool fits = s.rows >= 0 && s.cols >= 0 && s.experts >= 1 &&
                    s.experts < ops::kExpertsBelow &&
                    (ragged ? ops::is_countable({std::max<int64_t>(s.rows, s.experts), s.cols})
                            : ops::is_countable({s.rows, s.cols, s.experts}));
  require(fits, "quantized_view: shape is ", s.rows, " * ", s.cols, " of ", s.experts,
          " experts, must have an expert and at most 2^44 elements");
}

QuantizedView parts_of(const QuantizedShape& s) {
  require_countable(s);
  return {.codes = codes_of(s), .scales = scales_of(s)};
}

}  // namespace

QuantizedLayout quantized_layout(const QuantizedShape& s) {
  QuantizedLayout layout{.parts = parts_of(s)};
  const int64_t expert_scales = expert_scale_bytes(s), offsets = block_offsets_bytes(s);
  layout.scales_offset = aligned(bytes_of(layout.parts.codes));
  layout.bytes = layout.scales_offset + aligned(bytes_of(layout.parts.scales));
  if (expert_scales != 0) layout.expert_scale_offset = layout.bytes;
  layout.bytes += aligned(expert_scales);
  if (offsets != 0) layout.block_offsets_offset = layout.bytes;
  layout.bytes += aligned(offsets);
  return layout;
}

int64_t quantized_bytes(const QuantizedShape& s) { return quantized_layout(s).bytes; }

QuantizedView quantized_view(const QuantizedLayout& layout, void* buffer) {
  QuantizedView q = layout.parts;
  if (buffer == nullptr) return q;
  char* start = static_cast<char*>(buffer);
  q.codes.data = start;
  if (q.scales.rank != 0) q.scales.data = start + layout.scales_offset;
  if (layout.expert_scale_offset >= 0)
    q.expert_scale = reinterpret_cast<float*>(start + layout.expert_scale_offset);
  if (layout.block_offsets_offset >= 0)
    q.block_offsets = reinterpret_cast<int32_t*>(start + layout.block_offsets_offset);
  return q;
}

QuantizedView quantized_view(const QuantizedShape& s, void* buffer) {
  return buffer == nullptr ? parts_of(s) : quantized_view(quantized_layout(s), buffer);
}

}  // namespace cadre
