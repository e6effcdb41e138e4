#pragma once
#include <cstdint>

#include "cpu/gemm/products.h"

namespace cadre::cpu::gemm {

/// Memory that the next product will want: lines of so many bytes, `step` bytes apart.
struct Ahead {
  const char* data = nullptr;
  int64_t lines = 0, bytes = 0, step = 0;
};

/// t[rows, 64] (+)= a[rows, depth] * b[depth, 64]
///
/// a has rows of consecutive elements, `a_step` elements apart; t has no gaps. b is one column as
/// stage_b() writes it. In bf16 the depth is even.
struct TileShape {
  int64_t rows = 0, depth = 0, a_step = 0;
  bool accumulate = false;
};

struct TileFactors {
  const void *a, *b;
};

/// The width of a tile.
constexpr int64_t kTileWidth = 64;

/// Multiplies, and meanwhile asks memory for `ahead`, little by little: no library's product can,
/// and at few rows an expert the way of the weights from memory costs as much as the products.
/// AVX-512 only; where products are not for it, see refuses_tile_product().
///
/// Exact     One sum after the other along the contraction, fused, whatever the number of rows.
void tile_product(Multiplicand, const TileShape&, const TileFactors&, float* t, const Ahead&);

/// Why that processor should multiply otherwise; null if it should not.
const char* refuses_tile_product(Multiplicand, const Processor&);

}  // namespace cadre::cpu::gemm
