#pragma once
#include <cstdint>

#include "cadre/tensor.h"

namespace cadre::bench {

/// The element at a position of a view of f32, bf16 or f16; `offset` counts elements.
float load(const TensorView&, int64_t offset);

/// Writes a value rounded to nearest even.
void store(const TensorView&, int64_t offset, float value);

/// The distance of neighbouring values of f32, bf16 or f16 at |value|.
double step_at(DType, double value);

/// Offset in elements of the i-th element of a view, counting row-major.
int64_t offset_of(const TensorView&, int64_t i);

}  // namespace cadre::bench
