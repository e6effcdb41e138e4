#pragma once
#include <cmath>

#include "cadre/activation_kind.h"
#include "cadre/format.h"
#include "ops/checks.h"
#include "ops/problem_text.h"

namespace cadre::ops {

/// An activation as part of a problem.
struct ActivationRule {
  ActivationKind kind;
  const ActivationConstants& constants;
  GluLayout layout;
  int64_t features;
};

/// Whether a few neighbouring elements of a row are all that a scale depends on, so that an
/// activation can quantise what it computes.
inline bool has_row_scales(const FormatInfo& row) {
  return row.block >= 32 && row.block != kWholeLine && !row.has_expert_scale;
}
inline bool has_row_scales(const Format& f) {
  return has_row_scales(info(f.kind)) && !f.square && !f.stochastic && !f.hadamard;
}

/// What must hold of one, whatever computes it.
template <class Problem>
void check_activation(const Checks<Problem>& checks, const ActivationRule& a) {
  if (!info(a.kind).gated) {
    checks.holds(a.layout == GluLayout::kConcat, "layout is ", word_of(a.layout),
                 ", must be concat; an ungated activation has one input");
  }
  if (a.layout == GluLayout::kInterleave32) {
    checks.holds(a.features % 32 == 0, "F is ", a.features,
                 ", must be a multiple of 32; layout interleave32 comes in blocks of 32");
  }
  const ActivationConstants& c = a.constants;
  if (a.kind != ActivationKind::kClampedSwiGlu) {
    checks.holds(c == ActivationConstants(), "limit, alpha, offset are ", c.limit, ", ", c.alpha,
                 ", ", c.offset, ", must be the defaults; only clamped_swiglu has constants");
  }
  checks.holds(c.limit > 0 && std::isfinite(c.limit), "limit is ", c.limit,
               ", must be above 0 and finite");
  checks.holds(std::isfinite(c.alpha), "alpha is ", c.alpha, ", must be finite");
  checks.holds(std::isfinite(c.offset), "offset is ", c.offset, ", must be finite");
}

}  // namespace cadre::ops
