#pragma once
#include <cstdint>

#include "cadre/activation.h"
#include "cadre/host_device.h"

namespace cadre::activations {

/// Where feature f of gate and of up stand among the columns of z.
struct GluColumns {
  int64_t gate, up;
};

/// The columns of feature `f` of `features`.
CADRE_HD constexpr GluColumns glu_columns(GluLayout layout, int64_t f, int64_t features) {
  switch (layout) {
    case GluLayout::kConcat:
      return {f, features + f};
    case GluLayout::kInterleave1:
      return {2 * f, 2 * f + 1};
    default:
      return {f / 32 * 64 + f % 32, f / 32 * 64 + f % 32 + 32};
  }
}

/// Columns from one feature to the next, within a block of 32 features that starts at a multiple
/// of 32.
CADRE_HD constexpr int64_t glu_step(GluLayout layout) {
  return layout == GluLayout::kInterleave1 ? 2 : 1;
}

}  // namespace cadre::activations
