#pragma once
#include <cstdint>

#include "cpu/gemm/processor.h"
#include "cpu/gemm/products.h"

namespace cadre::cpu::gemm {

/// Memory that the next product will want: lines of so many bytes, `step` bytes apart.
struct Ahead {
  const char* data = nullptr;
  int64_t lines = 0, bytes = 0, step = 0;
};

/// t[rows, 64] (+)= a[rows, depth] * b[depth, 64]
///
/// a has rows of consecutive elements, `a_step` elements apart. b is one column as stage_b() writes
/// it. In bf16 the depth is even.
struct TileShape {
  int64_t rows = 0, depth = 0, a_step = 0;
  bool accumulate = false;
};

struct TileFactors {
  const void *a, *b;
};

/// t: fp32 rows without gaps, or bf16 rows `step` elements apart, each sum rounded once.
struct TileTarget {
  void* data;
  int64_t step = 0;
  bool bf16 = false;    ///< the factors are bf16 as well
  bool stream = false;  ///< past the caches, if rows begin at cache lines; see end_stream()

  static TileTarget sums(float* data) { return {data}; }
};

/// The width of a tile.
constexpr int64_t kTileWidth = 64;

/// Multiplies, and meanwhile asks memory for `ahead`, little by little: no library's product can,
/// and at few rows an expert the way of the weights from memory costs as much as the products.
/// AVX-512 only; where products are not for it, see refuses_tile_product().
///
/// Exact     One sum after the other along the contraction, fused, whatever the number of rows.
///           What bf16 rows held is added last.
void tile_product(Multiplicand, const TileShape&, const TileFactors&, const TileTarget&,
                  const Ahead&);

/// Why that processor should multiply otherwise; null if it should not.
const char* refuses_tile_product(Multiplicand, const Processor&);

}  // namespace cadre::cpu::gemm
