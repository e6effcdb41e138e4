#pragma once
#include <string_view>

#include "cadre/quantize.h"
#include "ops/checks.h"

// What quantise and dequantise both check of a quantised tensor.
namespace cadre::ops {

/// What a copy and the fields of its order are called.
struct CopyNames {
  std::string_view itself, codes_major, scales_major, decoded = {};
};

/// What the parts of a view are called. Literals: a run's checks allocate nothing.
struct PartNames {
  std::string_view codes, scales, expert_scale, block_offsets;
};
inline constexpr PartNames kPartsAlongK{"along_k.codes", "along_k.scales", "along_k.expert_scale",
                                        "along_k.block_offsets"};

/// The order of codes: that of the source, or, for weights of dgrad, with the contraction inside.
template <class Problem>
void check_codes_major(const Checks<Problem>& checks, std::string_view field,
                       const QuantizedShape& s) {
  if (s.codes_major == Major::kRow) return;
  const auto must = [&](bool good, std::string_view why) {
    checks.holds(good, field, " is column, must be row for ", to_string(s.format), "; ", why);
  };
  must(!is_plain(s.format), "plain weights are multiplied in either order");
  must(s.kind == RowsKind::kWeights, "codes of routed rows lie row-major");
  must(s.axis == Axis::kAlongRows, "along K the contraction is innermost already");
}

template <class Problem>
void check_scales_major(const Checks<Problem>& checks, std::string_view field,
                        const QuantizedShape& s) {
  if (s.scales_major == Major::kRow) return;
  const auto must = [&](bool good, std::string_view why) {
    checks.holds(good, field, " is column, must be row for ", to_string(s.format), "; ", why);
  };
  must(info(s.format.kind).block != 0, "it has no block scales");
  must(s.kind == RowsKind::kWeights || (s.axis == Axis::kAlongK && !s.format.square),
       "blocks that run down routed rows have one row of scales each");
}

/// A decoded copy has the order of plain operands.
template <class Problem>
void check_decoded(const Checks<Problem>& checks, std::string_view field, const QuantizedShape& s) {
  if (!s.decoded) return;
  checks.holds(!is_plain(s.format), field, " is yes, must be no for ", to_string(s.format),
               "; it has no codes");
  checks.holds(s.codes_major == Major::kRow && s.scales_major == Major::kRow, field,
               " is yes, must be no where codes or scales are column-major; a decoded copy has "
               "neither");
}

/// The shape, format and order of one quantised tensor.
template <class Problem>
void check_quantized(const Checks<Problem>& checks, const CopyNames& names,
                     const QuantizedShape& s) {
  require_legal(s.format);
  const bool rows = s.kind == RowsKind::kRagged;
  checks.at_least(rows ? "R" : "N", s.rows, 0);
  checks.fits_int32(rows ? "R" : "N", s.rows);
  checks.at_least(rows ? "C" : "K", s.cols, 0);
  checks.fits_int32(rows ? "C" : "K", s.cols);
  checks.experts(s.experts);
  if (rows) {
    checks.countable("R * C", {s.rows, s.cols});
    checks.countable("E * C", {s.experts, s.cols});
  } else {
    checks.countable("E * N * K", {s.experts, s.rows, s.cols});
  }
  const auto without = [&](bool good, std::string_view option, std::string_view why) {
    checks.holds(good, names.itself, " is ", to_string(s.format), ", must be without ", option,
                 "; ", why);
  };
  check_codes_major(checks, names.codes_major, s);
  check_scales_major(checks, names.scales_major, s);
  check_decoded(checks, names.decoded, s);
  if (!s.format.hadamard) return;
  without(s.axis == Axis::kAlongRows, "rht", "the transform runs along rows");
  without(rows, "rht", "the transform is for routed rows");
  without(!s.format.square, "2d", "a transformed copy serves one direction");
}

/// One view against the layout's; its lines may lie further apart.
template <class Problem>
void check_view(const Checks<Problem>& checks, std::string_view what, const TensorView& got,
                const TensorView& want, Major major) {
  const bool row = major == Major::kRow;
  const auto check = [&](Shape shape) {
    row ? checks.view(what, got, want.dtype, shape)
        : checks.column_view(what, got, want.dtype, shape);
  };
  want.rank == 2 ? check({want[0], want[1]}) : check({want[0], want[1], want[2]});
  checks.whole_bytes(what, got, major);
}

/// Whose rows are whose of transformed blocks without gaps.
template <class Problem>
void check_block_offsets(const Checks<Problem>& checks, std::string_view what,
                         const QuantizedShape& s, const int32_t* got) {
  if (s.decoded && is_transformed(s.format, s.axis))
    checks.present(what, got, int64_t(s.experts) + 1);
  else
    checks.absent(what, got, "only decoded copies of transformed blocks have offsets of their own");
}

/// Codes, scales and expert scales against the layout of quantized_view().
template <class Problem>
void check_parts(const Checks<Problem>& checks, const PartNames& names, const QuantizedShape& s,
                 const QuantizedView& got) {
  const QuantizedView want = quantized_view(s, nullptr);
  check_view(checks, names.codes, got.codes, want.codes, s.codes_major);
  if (want.scales.rank != 0)
    check_view(checks, names.scales, got.scales, want.scales, s.scales_major);
  else
    checks.absent(
        names.scales, got.scales,
        s.decoded ? "a decoded copy has no block scales" : "this format has no block scales");
  if (info(s.format.kind).has_expert_scale)
    checks.present(names.expert_scale, got.expert_scale, s.experts);
  else
    checks.absent(names.expert_scale, got.expert_scale, "this format has no expert scales");
  if (s.decoded || got.block_offsets != nullptr)
    check_block_offsets(checks, names.block_offsets, s, got.block_offsets);
}

/// Offsets for routed rows, none for weights.
template <class Problem>
void check_offsets(const Checks<Problem>& checks, const QuantizedShape& s, const Offsets& offsets) {
  if (s.kind == RowsKind::kRagged)
    checks.offsets(offsets, s.experts);
  else
    checks.absent("offsets.data", offsets.data, "weights have no offsets");
}

}  // namespace cadre::ops
