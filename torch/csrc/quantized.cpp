#include "quantized.h"

#include <ATen/ops/zeros.h>

namespace cadre::door {

using Symbols = std::vector<c10::SymInt>;

static Axis axis_of(c10::string_view axis) {
  TORCH_CHECK_VALUE(axis == "along_k" || axis == "along_rows", "axis is '", axis,
                    "', must be along_k or along_rows");
  return axis == "along_k" ? Axis::kAlongK : Axis::kAlongRows;
}

static int64_t experts_of(const Subject& s) {
  const size_t dims = s.offsets ? 2 : 3;
  TORCH_CHECK_VALUE(s.shape.size() == dims, "source has ", s.shape.size(),
                    " dimensions, must have ", dims,
                    "; rows [R, C] come with offsets, weights [E, N, K] without");
  return s.offsets ? s.offsets->sym_size(0).expect_int() - 1 : s.shape[0].expect_int();
}

/// Everything but the number of rows.
static QuantizedShape shape_without_rows(const Subject& s) {
  return {.kind = s.offsets ? RowsKind::kRagged : RowsKind::kWeights,
          .rows = 0,
          .cols = s.shape.back().expect_int(),
          .experts = int(experts_of(s)),
          .format = translated([&] { return parse_format(s.format); }),
          .axis = axis_of(s.axis)};
}

QuantizedShape quantized_shape(const Subject& s) {
  QuantizedShape shape = shape_without_rows(s);
  shape.rows = s.shape[s.shape.size() - 2].expect_int();
  return shape;
}

/// The length of every dimension of a view that was laid out without rows. With rows, the second
/// to last grows: by one a row, by one a block of rows, or by a whole block of rows.
static Symbols grown(const TensorView& v, c10::SymInt more, at::ScalarType type) {
  Symbols lengths(v.shape.begin(), v.shape.begin() + v.rank);
  if (type == at::kByte) lengths.back() = (v.shape[size_t(v.rank - 1)] + 1) / 2;
  lengths[lengths.size() - 2] = lengths[lengths.size() - 2] + std::move(more);
  return lengths;
}

Parts new_parts(const Subject& s, const at::Tensor& like) {
  const QuantizedShape shape = shape_without_rows(s);
  const QuantizedView parts = quantized_view(shape, nullptr);
  const c10::SymInt& rows = s.shape[s.shape.size() - 2];
  const FormatInfo& row = info(shape.format.kind);
  const auto make = [&](Symbols lengths, at::ScalarType type) {
    return at::zeros_symint(lengths, like.options().dtype(type));
  };
  const bool whole = is_transformed(shape.format, shape.axis);
  const auto codes = scalar_type(shape.format.element);
  Parts made;
  made.codes = make(grown(parts.codes, whole ? rows / 16 * 16 : rows, codes), codes);
  made.scales = make({0}, at::kFloat);
  if (row.block != 0) {
    const bool down = shape.format.square || shape.axis == Axis::kAlongRows;
    const bool ragged = shape.kind == RowsKind::kRagged;
    const c10::SymInt blocks = (ragged ? rows : rows + (row.block - 1)) / row.block;
    const auto type = scalar_type(row.scale);
    made.scales = make(grown(parts.scales, down ? blocks : rows, type), type);
  }
  made.expert_scale = make({row.has_expert_scale ? shape.experts : 0}, at::kFloat);
  return made;
}

/// The view that the core lays out, at the place of a tensor of that many bytes.
static TensorView placed(TensorView like, const at::Tensor& t, const Expected& expected) {
  require_same_device(expected.on, t, expected.what);
  const int64_t bytes = bytes_for(like.dtype, like[0] * like.stride[0]);
  TORCH_CHECK_VALUE(t.scalar_type() == scalar_type(like.dtype), expected.what, " is ",
                    t.scalar_type(), ", must be ", scalar_type(like.dtype));
  TORCH_CHECK_VALUE(t.is_contiguous() && int64_t(t.nbytes()) == bytes, expected.what, " has shape ",
                    t.sizes(), " and strides ", t.strides(), ", must be contiguous, for ",
                    to_string(like));
  like.data = t.data_ptr();
  return like;
}

QuantizedView view(const Parts& parts, const QuantizedShape& shape, const at::Tensor& on) {
  QuantizedView v = quantized_view(shape, nullptr);
  v.codes = placed(v.codes, parts.codes, {"codes", {}, on});
  if (v.scales.rank != 0) v.scales = placed(v.scales, parts.scales, {"scales", {}, on});
  if (info(shape.format.kind).has_expert_scale)
    v.expert_scale =
        written_floats(parts.expert_scale, {"expert_scale", {int64_t(shape.experts)}, on});
  return v;
}

}  // namespace cadre::door
