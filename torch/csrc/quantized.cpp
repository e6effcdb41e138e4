#include "quantized.h"

#include <ATen/ops/zeros.h>

namespace cadre::door {

using Symbols = std::vector<c10::SymInt>;

static Axis axis_of(c10::string_view axis) {
  TORCH_CHECK_VALUE(axis == "along_k" || axis == "along_rows", "axis is '", axis,
                    "', must be along_k or along_rows");
  return axis == "along_k" ? Axis::kAlongK : Axis::kAlongRows;
}

static void require_rank(const QuantizedSpec& s) {
  const size_t dims = s.offsets ? 2 : 3;
  TORCH_CHECK_VALUE(s.shape.size() == dims, "source has ", s.shape.size(),
                    " dimensions, must have ", dims,
                    "; rows [R, C] come with offsets, weights [E, N, K] without");
}

static c10::SymInt experts_of(const QuantizedSpec& s) {
  return s.offsets ? s.offsets->sym_size(0) - 1 : s.shape[0];
}

QuantizedShape quantized_shape(const QuantizedSpec& s) {
  require_rank(s);
  const size_t last = s.shape.size() - 1;
  return {.kind = s.offsets ? RowsKind::kRagged : RowsKind::kWeights,
          .rows = s.shape[last - 1].expect_int(),
          .cols = s.shape[last].expect_int(),
          .experts = int(experts_of(s).expect_int()),
          .format = translate_errors([&] { return parse_format(s.format); }),
          .axis = axis_of(s.axis)};
}

/// Length of a dimension in which a block covers so many.
static c10::SymInt ceil_div(const c10::SymInt& length, int64_t block) {
  return (length + (block - 1)) / block;
}

/// The layout of quantized_view(), which view() checks, in symbols.
struct Lengths {
  Symbols codes, scales;
};

static Lengths lengths_of(const QuantizedSpec& s, const Format& format) {
  require_rank(s);
  const int64_t block = info(format.kind).block;
  const Axis axis = axis_of(s.axis);
  const bool down = format.square || axis == Axis::kAlongRows;
  const bool across = format.square || axis == Axis::kAlongK;
  const size_t last = s.shape.size() - 1;
  const c10::SymInt &rows = s.shape[last - 1], &cols = s.shape[last];
  const auto blocks = [&](int64_t size) {
    return s.offsets ? rows / size + experts_of(s) : ceil_div(rows, size);
  };
  Symbols codes = s.shape.vec(), scales = codes;
  if (bits(format.element) == 4) codes[last] = ceil_div(cols, 2);
  if (s.offsets && is_transformed(format, axis)) codes[last - 1] = blocks(16) * 16;
  if (block == 0) return {codes, {0}};
  if (down) scales[last - 1] = blocks(block);
  if (across) scales[last] = ceil_div(cols, block);
  return {codes, scales};
}

QuantizedTensors new_quantized_tensors(const QuantizedSpec& s, const at::Tensor& like) {
  const Format format = translate_errors([&] { return parse_format(s.format); });
  const FormatInfo& row = info(format.kind);
  const Lengths lengths = lengths_of(s, format);
  const auto zeros = [&](const Symbols& shape, at::ScalarType type) {
    return at::zeros_symint(shape, like.options().dtype(type));
  };
  return {.codes = zeros(lengths.codes, scalar_type(format.element)),
          .scales = zeros(lengths.scales, scalar_type(row.scale)),
          .expert_scale = zeros({row.has_expert_scale ? experts_of(s) : 0}, at::kFloat)};
}

/// The view that the core lays out, at the place of a tensor of that many bytes.
static TensorView placed(TensorView like, const at::Tensor& t, const Expected& expected) {
  require_same_device(expected.on, t, expected.what);
  std::vector<int64_t> shape(like.shape.begin(), like.shape.begin() + like.rank);
  shape.back() = bytes_for(like.dtype, shape.back()) * 8 / std::max(bits(like.dtype), 8);
  require_type(t, scalar_type(like.dtype), expected.what);
  TORCH_CHECK_VALUE(t.is_contiguous(), expected.what, " has strides ", t.strides(),
                    ", must be contiguous");
  TORCH_CHECK_VALUE(t.sizes() == shape, expected.what, " has shape ", t.sizes(), ", must be ",
                    at::IntArrayRef(shape), ", as of ", to_string(like));
  require_memory(t, expected.what);
  like.data = t.data_ptr();
  return like;
}

/// What a format does not have is an empty tensor, on the same device.
static void require_empty(const at::Tensor& t, const at::Tensor& on, const char* what,
                          const Format& format) {
  require_same_device(on, t, what);
  TORCH_CHECK_VALUE(t.numel() == 0, what, " has shape ", t.sizes(), ", must be empty; ",
                    to_string(format), " has none");
}

QuantizedView view(const QuantizedTensors& tensors, const QuantizedShape& shape,
                   const at::Tensor& on) {
  QuantizedView v = quantized_view(shape, nullptr);
  v.codes = placed(v.codes, tensors.codes, {"codes", {}, on});
  if (v.scales.rank != 0)
    v.scales = placed(v.scales, tensors.scales, {"scales", {}, on});
  else
    require_empty(tensors.scales, on, "scales", shape.format);
  if (info(shape.format.kind).has_expert_scale)
    v.expert_scale =
        written_floats(tensors.expert_scale, {"expert_scale", {int64_t(shape.experts)}, on});
  else
    require_empty(tensors.expert_scale, on, "expert_scale", shape.format);
  return v;
}

}  // namespace cadre::door
