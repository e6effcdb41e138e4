#include <algorithm>

#include "cadre/error.h"
#include "cpu/clones.h"
#include "cpu/gemm/means.h"

namespace cadre::cpu::gemm {
namespace {

constexpr int kRows = 4, kLanes = 16;  // of a block, whose sums stay in registers
constexpr int64_t kColumn = 64;        // the width of a column of b

struct Sums {
  alignas(64) float at[kRows][kLanes];
};

/// sums += rows * b, whose lines lie `step` elements apart.
CADRE_CLONES
void multiply_block(const float* const* rows, const float* b, int64_t step, int64_t depth,
                    Sums& sums) {
  Sums sum = sums;
  for (int64_t d = 0; d < depth; ++d)
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kLanes; ++j) sum.at[i][j] += rows[i][d] * b[d * step + j];
  sums = sum;
}

class PortableProducts final : public Products {
 public:
  void multiply(const ProductShape& s, const void* a, const void* b, void* t) const override {
    const int64_t step = std::min(kColumn, s.width);
    const int64_t padded = round_up(s.depth, depth_unit(Multiplicand::kF32));
    for (int64_t col = 0; col < s.width; col += kLanes) {
      const int64_t lane = col % kColumn, column = col - lane;
      const float* lines = static_cast<const float*>(b) + column * padded + lane;
      for (int64_t row = 0; row < s.height; row += kRows)
        multiply_rows(s, static_cast<const float*>(a) + row * s.depth, {lines, step},
                      static_cast<float*>(t) + row * s.width + col, s.height - row);
    }
  }

 private:
  struct Lines {
    const float* data;
    int64_t step;
  };

  /// A block, of which `left` rows are there; the last of them stands in for the others.
  static void multiply_rows(const ProductShape& s, const float* a, const Lines& b, float* t,
                            int64_t left) {
    const int64_t there = std::min<int64_t>(kRows, left);
    const float* rows[kRows];
    Sums sums{};
    for (int64_t i = 0; i < kRows; ++i) rows[i] = a + std::min(i, there - 1) * s.depth;
    if (s.accumulate)
      for (int64_t i = 0; i < there; ++i) std::copy_n(t + i * s.width, kLanes, sums.at[i]);
    multiply_block(rows, b.data, b.step, s.depth, sums);
    for (int64_t i = 0; i < there; ++i) std::copy_n(sums.at[i], kLanes, t + i * s.width);
  }
};

}  // namespace

ThreadProducts portable_products(Multiplicand type) {
  require(type == Multiplicand::kF32, "grouped_gemm: portable products are of fp32");
  static const PortableProducts kProducts;  // holds nothing, so one will do for all threads
  return {&kProducts, [](const Products*) {}};
}

}  // namespace cadre::cpu::gemm
