#pragma once
#include "cadre/quantize.h"

namespace cadre::formats {

/// True if a copy has one scale for each whole line of an expert that is contracted.
inline bool has_whole_lines(const Format& format) { return info(format.kind).block == kWholeLine; }

/// The lines of one expert of a copy: columns if they run along rows. Rows of a batch are those of
/// all experts.
inline int64_t lines_of(const QuantizedShape& s) {
  return s.axis == Axis::kAlongK ? s.rows : s.cols;
}

/// How many amaxes are found before a copy's first code: those of experts, or of whole lines.
inline int64_t amaxes_of(const QuantizedShape& s) {
  if (has_whole_lines(s.format)) {
    const bool all = s.kind == RowsKind::kRagged && s.axis == Axis::kAlongK;
    return lines_of(s) * (all ? 1 : s.experts);
  }
  return info(s.format.kind).has_expert_scale ? s.experts : 0;
}

}  // namespace cadre::formats
