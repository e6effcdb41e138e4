#pragma once
#include <optional>

#include "cadre/quantize.h"

// Which copies have a least amax: those whose scales are fp32.
namespace cadre::ops {

inline bool hears_amax_eps(const std::optional<Format>& format) {
  return format && !is_plain(*format) && info(format->kind).scale == DType::kF32;
}
inline bool hears_amax_eps(const QuantizeProblem& p) {
  return hears_amax_eps(p.along_k) || hears_amax_eps(p.along_rows);
}
constexpr const char* kAmaxEpsUnheard = ", must be 0; only fp32 scales have a least amax";

}  // namespace cadre::ops
