#pragma once

namespace cadre::cpu::gemm {

/// What products can make of this processor; docs/decisions/0004-cpu-products.md has the
/// measurements.
struct Processor {
  /// bf16 products are safe, and faster than widening to fp32.
  bool bf16 = false;
  /// AVX-512: the bits of an element do not depend on the height and width of its tile, but that
  /// products of few numbers in matrix tiles have their own.
  bool free_tiles = false;
  /// oneDNN multiplies bf16 in matrix tiles (AMX).
  bool matrix_tiles = false;
};

/// With oneDNN what oneDNN may use, else what there is.
const Processor& processor();

}  // namespace cadre::cpu::gemm
