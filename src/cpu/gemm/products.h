#pragma once
#include <cstdint>
#include <memory>

namespace cadre::cpu::gemm {

/// What operands are multiplied as; sums are fp32 either way.
enum class Multiplicand : uint8_t { kF32, kBf16 };

constexpr int64_t bytes_of(Multiplicand type) { return type == Multiplicand::kF32 ? 4 : 2; }

/// Depths are padded with zeros to a multiple of this, so that no product ever has to.
constexpr int64_t depth_unit(Multiplicand type) { return type == Multiplicand::kF32 ? 16 : 32; }

/// t[height, width] (+)= a[height, depth] * b[depth, width]
///
/// a and t are row-major without gaps. b is cut into columns of 64, each [depth, 64] row-major with
/// its depth padded to depth_unit(); in bf16 two rows are interleaved element by element. The width
/// is a multiple of 16; below 64, b is one column of that width. Without free_tiles (processor.h)
/// the width is 64.
struct ProductShape {
  int64_t height = 0, depth = 0, width = 0;
  bool accumulate = false;

  bool operator==(const ProductShape&) const = default;
};

/// The products of one thread of a parallel region. Neither sums nor speed depend on who else runs.
class Products {
 public:
  virtual ~Products() = default;
  virtual void multiply(const ProductShape&, const void* a, const void* b, void* t) const = 0;
};

/// Products, and how the thread gives them back.
using ThreadProducts = std::unique_ptr<const Products, void (*)(const Products*)>;

/// Products in plain C++, for any processor, of fp32 alone.
///
/// Exact     One product after the other along the contraction, each rounded before it is added.
ThreadProducts portable_products(Multiplicand);

/// Products by oneDNN, each made for a single thread; this room is linked without oneDNN too, and
/// then nobody calls it (docs/decisions/0004-cpu-products.md).
ThreadProducts onednn_products(Multiplicand);

}  // namespace cadre::cpu::gemm
