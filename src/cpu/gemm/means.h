#pragma once
#include "cadre/grouped_gemm.h"
#include "cpu/gemm/processor.h"
#include "cpu/gemm/products.h"

namespace cadre::cpu::gemm {

/// What a run works with. Results depend on the type and on who multiplies.
struct Means {
  Multiplicand type = Multiplicand::kF32;
  int threads = 1;
  /// Bytes of staged operands that a wave aims at: a few times the L2 caches of all threads, so
  /// that operands are still near when they are multiplied, and threads busy between two barriers.
  int64_t wave_bytes = kWaveOfThread;
  ThreadProducts (*products)(Multiplicand) = portable_products;

  static constexpr int64_t kWaveOfThread = int64_t(3) << 20;
};

/// By how many threads of the device the problem is worth being multiplied.
Means means_of(const GroupedGemmProblem&, const Device&, Multiplicand);

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

/// The width that Products takes for so many columns.
inline int64_t padded_width(int64_t cols) {
  if (!processor().free_tiles) return round_up(cols, 64);
  return round_up(cols, cols <= 64 ? 16 : 64);
}

}  // namespace cadre::cpu::gemm
