#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cadre/format.h"
#include "cadre/offsets.h"

#pragma GCC visibility push(default)
namespace cadre {

/// Whose rows are quantised: routed rows [R, C] with offsets, or weights [E, N, K].
enum class RowsKind : uint8_t { kRagged, kWeights };

/// The shape of one quantised tensor, enough to lay it out in memory.
struct QuantizedShape {
  RowsKind kind = RowsKind::kRagged;
  int64_t rows = 0;  ///< R for routed rows; N, the rows of one expert, for weights
  int64_t cols = 0;  ///< C or K
  int experts = 1;   ///< E
  Format format{};
  Axis axis = Axis::kAlongK;
  Major codes_major = Major::kRow;   ///< column: weights along rows, whose contraction is N
  Major scales_major = Major::kRow;  ///< column: not of blocks that run down routed rows
  bool decoded = false;              ///< numbers instead of codes and block scales

  bool operator==(const QuantizedShape&) const = default;
};

/// Codes and scales of one tensor. value = code * block scale * expert scale, those that exist.
///
/// Codes have the shape of the source, whatever the axis: [R, C] or [E, N, K], 4-bit codes packed
/// two a byte along the last dimension, every row starting at a byte (row stride = C rounded up to
/// even). Scales, with B = block:
///                 along K              along rows           2d
///   routed rows   [R, ceil(C / B)]     [R / B + E, C]       [R / B + E, ceil(C / B)]
///   weights       [E, N, ceil(K / B)]  [E, ceil(N / B), K]  [E, ceil(N / B), ceil(K / B)]
/// Routed blocks along rows restart at every expert: block b of expert e is row
/// offsets[e] / B + e + b of the scales. Rows of scales that no block owns are not written.
///
/// Column-major codes have the same shape and lie as [E, K, N], so that the contraction of dgrad is
/// innermost: stride 1 along N, 4-bit codes packed along N, every column starting at a byte.
/// Column-major scales have stride 1 down a column, and every column takes a multiple of 16 bytes:
/// those of rows [R, ceil(C / B)] lie as [ceil(C / B), R'], so that the scales of a tile's rows in
/// one block are one bulk copy. Neither changes a code or a scale.
///
/// A Hadamard transform makes sixteen values of a block, the last one of an expert too, in which
/// missing rows count as zero. So with `rht` along rows the codes are [16 (R / 16 + E), C]: row b
/// of the scales belongs to rows 16 b to 16 b + 15 of the codes. code_rows() hides the difference.
///
/// A decoded copy has, in place of codes and block scales, their products in decoded_format():
/// operands of products in that type, whose sums the expert scales multiply. It is row-major. Its
/// transformed blocks lie without gaps, and it says whose rows are whose, as offsets do.
struct QuantizedView {
  TensorView codes{};
  TensorView scales{};               ///< empty for plain formats, fp8_tensor and decoded copies
  float* expert_scale = nullptr;     ///< [E]: fp8_tensor, nvfp4
  int32_t* block_offsets = nullptr;  ///< [E + 1]: decoded copies that are transformed
};

/// First row of the scales of expert e's blocks that run along rows, for routed rows.
constexpr int64_t first_block(int64_t first_row, int64_t expert, int64_t block) {
  return first_row / block + expert;
}

/// Consecutive rows of codes.
struct CodeRows {
  int64_t first = 0;
  int64_t count = 0;
};

/// True if the codes are those of transformed blocks, stored whole.
constexpr bool is_transformed(const Format& format, Axis axis) {
  return format.hadamard && axis == Axis::kAlongRows;
}

/// The rows of codes that hold rows [first, first + count) of expert e, routed rows only: the same
/// rows, or the expert's transformed blocks. wgrad contracts exactly these.
constexpr CodeRows code_rows(bool transformed, CodeRows of, int64_t expert) {
  constexpr int64_t kBlock = 16;
  if (!transformed) return of;
  return {kBlock * first_block(of.first, expert, kBlock),
          (of.count + kBlock - 1) / kBlock * kBlock};
}
constexpr CodeRows code_rows(const Format& format, Axis axis, CodeRows of, int64_t expert) {
  return code_rows(is_transformed(format, axis), of, expert);
}

/// How one buffer holds codes, scales and expert scales, each 256-byte aligned.
struct QuantizedLayout {
  QuantizedView parts{};              ///< shapes and strides, without addresses
  int64_t scales_offset = 0;          ///< bytes
  int64_t expert_scale_offset = -1;   ///< bytes; -1: the format has none
  int64_t block_offsets_offset = -1;  ///< bytes; -1: there are none
  int64_t bytes = 0;                  ///< of the buffer
};

/// Errors    InvalidArgument for lengths that are negative, and for more than 2^44 elements.
QuantizedLayout quantized_layout(const QuantizedShape&);
int64_t quantized_bytes(const QuantizedShape&);

/// The parts of such a buffer. With null, the views carry shapes and strides only.
QuantizedView quantized_view(const QuantizedLayout&, void* buffer);
QuantizedView quantized_view(const QuantizedShape&, void* buffer);

/// `quantize rows R=8192 C=4096 E=64 source=bf16 along_k=mxfp8 along_rows=mxfp8 role=x`,
/// `quantize weights N=2048 K=4096 E=64 source=f32 along_k=fp8_block:2d role=w`,
/// `quantize weights N=2048 K=4096 E=64 source=bf16 along_rows=fp8_block:2d role=w
/// along_rows_codes_major=column`,
/// `quantize rows R=8192 C=4096 E=64 along_k=mxfp8 role=x along_k_decoded=yes`,
/// `quantize rows R=8192 C=4096 E=64 along_k=mxfp8 role=x gather=yes T=2048 top_k=4`.
struct QuantizeProblem {
  using Args = struct QuantizeArgs;
  static constexpr OperationText kOperation = {
      "quantize", "codes and scales along K, along rows, or both at once",
      "quantize rows R=8192 C=4096 E=64 along_k=mxfp8 along_rows=mxfp8"};

  RowsKind kind = RowsKind::kRagged;
  int64_t rows = 0;                    ///< R, or N of each expert
  int64_t cols = 0;                    ///< C, or K
  int experts = 1;                     ///< E
  DType source = DType::kBf16;         ///< f32, bf16 or f16
  std::optional<Format> along_k{};     ///< the copy along K, if wanted
  std::optional<Format> along_rows{};  ///< the copy along rows, if wanted
  TensorRole role = TensorRole::kX;    ///< for stochastic rounding
  float amax_eps = 0;                  ///< lower bound of an amax, fp32 scales only
  bool discrete = false;               ///< weights only: the source is E pointers
  bool gather = false;                 ///< routed rows only: the source is tokens, see slot_of
  int64_t tokens = 0;                  ///< T: rows of the source; 0 without gather
  int top_k = 1;                       ///< slots of a token

  /// How the copies lie, as in QuantizedShape; codes along K are row-major.
  Major along_k_scales_major = Major::kRow;
  Major along_rows_codes_major = Major::kRow, along_rows_scales_major = Major::kRow;
  bool along_k_decoded = false, along_rows_decoded = false;

  bool operator==(const QuantizeProblem&) const = default;
};

/// The layout of the copy along an axis; that copy must be wanted.
QuantizedShape copy_shape(const QuantizeProblem&, Axis);

struct QuantizeArgs {
  TensorView source{};  ///< [R, C], gathered [T, C], or [E, N, K]; discrete: data null, [E, N, K]
  const void* const* discrete = nullptr;  ///< [E] device pointers, each [N, K]
  const int32_t* slot_of = nullptr;       ///< [R] with gather: as in RowMap
  Offsets offsets{};                      ///< routed rows only
  QuantizedView along_k{}, along_rows{};  ///< written
  const uint64_t* rng = nullptr;          ///< [2] seed and offset in device memory; option sr only
};

using QuantizePlan = Plan<QuantizeProblem>;

/// Quantises a tensor along K, along rows, or both in one call.
///
/// Shapes    see QuantizedView.
/// Types     source f32, bf16 or f16. A plain format casts, rounding to nearest even.
/// Rows      the tail is neither read (no amax sees it) nor written. With gather row r of the batch
///           is row slot_of[r] / top_k of the source, and zero where slot_of[r] is no slot: the
///           codes and scales of the numbers that permute writes.
/// Errors    InvalidArgument for shapes, strides, missing rng, no copy asked for.
/// Exact     codes and scales equal the CPU reference bit for bit on every device.
/// Source    docs/numerics.md.
QuantizePlan plan(const QuantizeProblem&, const Device&, std::string_view only = {});
void run(const QuantizePlan&, const QuantizeArgs&, Workspace, Stream);

std::string to_string(const QuantizeProblem&);
QuantizeProblem parse_quantize_problem(std::string_view);

}  // namespace cadre
#pragma GCC visibility pop
