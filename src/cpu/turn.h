#pragma once
#include "cadre/tensor.h"

namespace cadre::cpu {

/// Copies codes or scales of 4, 8 or 32 bits from a row-major matrix to a column-major one of the
/// same shape. A half-filled last byte of a column has a zero above.
void turn_to_columns(const TensorView& from, const TensorView& to);

/// The other way round.
inline void turn_to_rows(const TensorView& from, const TensorView& to) {
  turn_to_columns(transposed(from), transposed(to));
}

}  // namespace cadre::cpu
