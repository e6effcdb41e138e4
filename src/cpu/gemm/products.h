#pragma once
#include <array>
#include <cstdint>
#include <dnnl.hpp>

namespace cadre::cpu::gemm {

/// What operands are multiplied as; sums are fp32 either way.
enum class Multiplicand : uint8_t { kF32, kBf16 };

constexpr int64_t bytes_of(Multiplicand type) { return type == Multiplicand::kF32 ? 4 : 2; }

/// Depths are padded with zeros to a multiple of this, so that oneDNN never has to.
constexpr int64_t depth_unit(Multiplicand type) { return type == Multiplicand::kF32 ? 16 : 32; }

/// What oneDNN makes of this processor; docs/decisions/0004-cpu-products.md has the measurements.
struct Processor {
  /// bf16 products are safe, and faster than widening to fp32.
  bool bf16 = false;
  /// The bits of an element do not depend on the height and width of its tile.
  bool free_tiles = false;
};
const Processor& processor();

/// t[height, width] (+)= a[height, depth] * b[depth, width]
///
/// a and t are row-major without gaps. b is cut into columns of 64, each [depth, 64] row-major; in
/// bf16 two rows are interleaved element by element. A width below 64 is 16, 32 or 48, with columns
/// of that width; above it is a multiple of 64. Without free_tiles the width is 64. Or b is
/// row-major without gaps, of any width.
struct ProductShape {
  int64_t height = 0, depth = 0, width = 0;
  bool accumulate = false;
  bool b_by_rows = false;

  bool operator==(const ProductShape&) const = default;
};

/// The products of one thread, made by oneDNN for a single thread each, so that neither sums nor
/// speed depend on who else runs. Lives on one thread of a parallel region.
class Products {
 public:
  explicit Products(Multiplicand);
  void multiply(const ProductShape&, const void* a, const void* b, float* t);

 private:
  struct Slot {
    ProductShape shape;
    dnnl::matmul primitive;
    dnnl::memory a, b, t;
  };
  Slot& slot(const ProductShape&);
  Slot make(const ProductShape&) const;

  static constexpr size_t kSlots = 64;

  Multiplicand type_;
  dnnl::stream stream_;
  std::array<Slot, kSlots> slots_;
  size_t used_ = 0;
};

}  // namespace cadre::cpu::gemm
