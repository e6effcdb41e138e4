#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "cadre/dtype.h"

#pragma GCC visibility push(default)
namespace cadre {

/// The number formats. One row of src/formats/list.h each; docs/formats.md is written from the
/// list.
enum class FormatKind : uint8_t {
  kF32,        ///< as is
  kBf16,       ///< as is
  kF16,        ///< as is
  kFp8Tensor,  ///< 8-bit codes, one fp32 scale per expert
  kFp8Row,     ///< 8-bit codes, one fp32 scale per row, or per column, of an expert
  kFp8Block,   ///< 8-bit codes, one fp32 scale per 128 codes (or 128 x 128)
  kMxfp8,      ///< 8-bit codes, one e8m0 scale per 32 codes (or 32 x 32)
  kNvfp4,      ///< e2m1 codes, one e4m3 scale per 16 codes (or 16 x 16), one fp32 scale per expert
  kMxfp4,      ///< e2m1 codes, one e8m0 scale per 32 codes
};

/// The block of a format whose scale serves a whole line of an expert: no line is longer.
constexpr int kWholeLine = INT32_MAX;

/// A format with its options. A value; two formats are equal if every option is.
struct Format {
  FormatKind kind = FormatKind::kBf16;
  DType element = DType::kBf16;  ///< type of a code; e4m3 or e5m2 for the 8-bit formats
  bool square = false;           ///< "2d": a scale serves block x block codes, in both directions
  bool power_of_two = false;  ///< "pow2" / "fp32": fp32 scales cleared to a power of two, or free
  bool floor_scale = false;   ///< "floor": e8m0 scales by the OCP rule, rounded down
  bool hadamard = false;      ///< "rht": random Hadamard transform of the copy along rows
  bool stochastic = false;    ///< "sr": stochastic rounding of the codes

  bool operator==(const Format&) const = default;
};

/// What is fixed for a kind of format, printed by `cadre info` and docs/formats.md.
struct FormatInfo {
  FormatKind kind = FormatKind::kBf16;
  std::string_view name;         ///< "mxfp8"
  DType element = DType::kBf16;  ///< default type of a code
  bool takes_e5m2 = false;       ///< the element may also be e5m2
  int block = 0;  ///< codes that share a scale, or kWholeLine; 0: none, or one scale per expert
  DType scale = DType::kF32;          ///< type of a block's scale; f32 where there is none
  bool has_expert_scale = false;      ///< one fp32 factor per expert
  bool takes_square = false;          ///< option 2d
  bool takes_power_of_two = false;    ///< options pow2, fp32
  bool takes_floor = false;           ///< option floor
  bool takes_hadamard = false;        ///< option rht
  bool takes_stochastic = false;      ///< option sr
  bool power_of_two_default = false;  ///< value of power_of_two where the text says nothing
  std::string_view summary;           ///< one line
};

/// All formats, in the order of FormatKind.
std::span<const FormatInfo> format_list();
const FormatInfo& info(FormatKind);

/// A word behind the colon of a format's text.
struct FormatOption {
  std::string_view word;      ///< "2d"
  std::string_view summary;   ///< one line
  bool FormatInfo::*takes{};  ///< which formats take it
};

/// All options, in the order in which they print.
std::span<const FormatOption> format_option_list();

/// The format with its default options.
Format format(FormatKind);

/// True for f32, bf16 and f16: stored values, no codes, no scales.
bool is_plain(const Format&);

/// True where quantise reads its source twice, first for the amax of an expert or of a line.
bool reads_source_twice(const Format&);

/// The plain format that a code times its block scale is decoded to: bf16, or f32 where block
/// scales are free and the product has more digits. docs/numerics.md says which products are bf16
/// numbers; the others are rounded once. Of a plain format itself.
Format decoded_format(const Format&);

/// "bf16", "mxfp8", "nvfp4:rht+sr", "fp8_block:2d", "fp8_tensor:e5m2". Options in the order
/// e5m2, 2d, pow2 or fp32, floor, rht, sr; only those that differ from the default.
std::string to_string(const Format&);

/// Inverse of `to_string`.
/// Errors    InvalidArgument with the known formats, or the options that this format takes.
Format parse_format(std::string_view);

/// For formats that were put together by hand: checks that the kind takes the element and every
/// option that is set.
/// Errors    InvalidArgument with the options that this format takes.
void require_legal(const Format&);

/// The axis a block of codes runs along, named by what it is for. For x and dy [R, C]: along K is
/// along a row (fprop and dgrad contract it), along rows is down a column (wgrad contracts it), and
/// blocks restart at every expert's first row. For w [E, N, K]: along K for fprop, along rows (N)
/// for dgrad.
enum class Axis : uint8_t { kAlongK, kAlongRows };

/// Which tensor of a layer a stochastic rounding belongs to; part of the Philox counter.
enum class TensorRole : uint8_t { kX, kW, kDy, kH, kDz };

}  // namespace cadre
#pragma GCC visibility pop
