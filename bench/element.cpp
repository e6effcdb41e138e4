#include "bench/element.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "cadre/error.h"

namespace cadre::bench {
namespace {

float from_half(uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const float sign = half >> 15 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(float(mantissa), -24);
  return sign * std::ldexp(float(1024 + mantissa), exponent - 25);
}

uint16_t to_half(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::abs(value);
  if (std::isnan(value)) return uint16_t(sign | 0x7e00);
  if (size >= 65520.0f) return uint16_t(sign | 0x7c00);
  const int exponent = std::max(size == 0 ? -14 : std::ilogb(size), -14);
  // In units of the step; a carry into the next binade is the right code by itself.
  const auto units = uint16_t(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return uint16_t(sign | (exponent + 14) << 10) + units;
}

uint16_t to_bf16(float value) {
  const auto word = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return uint16_t(word >> 16 | 0x40);
  return uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

}  // namespace

float load(const TensorView& v, int64_t offset) {
  switch (v.dtype) {
    case DType::kF32:
      return static_cast<const float*>(v.data)[offset];
    case DType::kBf16:
      return std::bit_cast<float>(uint32_t(static_cast<const uint16_t*>(v.data)[offset]) << 16);
    case DType::kF16:
      return from_half(static_cast<const uint16_t*>(v.data)[offset]);
    default:
      throw InvalidArgument(text("load: dtype is ", name(v.dtype), ", must be plain"));
  }
}

void store(const TensorView& v, int64_t offset, float value) {
  switch (v.dtype) {
    case DType::kF32:
      static_cast<float*>(v.data)[offset] = value;
      return;
    case DType::kBf16:
      static_cast<uint16_t*>(v.data)[offset] = to_bf16(value);
      return;
    case DType::kF16:
      static_cast<uint16_t*>(v.data)[offset] = to_half(value);
      return;
    default:
      throw InvalidArgument(text("store: dtype is ", name(v.dtype), ", must be plain"));
  }
}

double step_at(DType dtype, double value) {
  struct Steps {
    int mantissa, smallest;
  };
  const Steps s = dtype == DType::kF32    ? Steps{23, -126}
                  : dtype == DType::kBf16 ? Steps{7, -126}
                                          : Steps{10, -14};
  const int exponent = value == 0 || !std::isfinite(value) ? s.smallest : std::ilogb(value);
  return std::ldexp(1.0, std::max(exponent, s.smallest) - s.mantissa);
}

int64_t offset_of(const TensorView& v, int64_t i) {
  int64_t offset = 0;
  for (int d = v.rank - 1; d >= 0; --d) {
    offset += i % v.shape[d] * v.stride[d];
    i /= v.shape[d];
  }
  return offset;
}

}  // namespace cadre::bench
