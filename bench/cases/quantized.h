#pragma once
#include "bench/cases/parts.h"

namespace cadre::bench {

/// Random values, quantised. `buffer` keeps codes, scales and expert scales in one piece.
struct RandomQuantized {
  QuantizedView view;
  void* buffer = nullptr;
};
RandomQuantized random_quantized(Buffers&, const QuantizedShape&, const Rows&, uint64_t seed);

/// A tensor for the values of quantised codes: as many rows as there are rows of codes.
TensorView decoded_tensor(Buffers&, const QuantizedShape&, DType);

/// |value| of quantised codes, as a contiguous f32 tensor. The tail is NaN; where transformed
/// blocks leave gaps between experts there is zero.
TensorView absolute_values(Buffers&, const QuantizedShape&, const QuantizedView&, const Offsets&);

}  // namespace cadre::bench
