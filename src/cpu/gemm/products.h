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
  /// AVX-512: the bits of an element do not depend on the height and width of its tile.
  bool free_tiles = false;
  /// oneDNN multiplies bf16 in matrix tiles (AMX).
  bool matrix_tiles = false;
};
const Processor& processor();

/// oneDNN's handle of this processor.
const dnnl::engine& cpu_engine();

/// t[height, width] (+)= a[height, depth] * b[depth, width]
///
/// a and t are row-major without gaps. b is cut into columns of 64, each [depth, 64] row-major; in
/// bf16 two rows are interleaved element by element. The width is a multiple of 16; below 64, b is
/// one column of that width. Without free_tiles the width is 64.
struct ProductShape {
  int64_t height = 0, depth = 0, width = 0;
  bool accumulate = false;

  bool operator==(const ProductShape&) const = default;
};

/// The products of one thread, made by oneDNN for a single thread each, so that neither sums nor
/// speed depend on who else runs. Lives on one thread of a parallel region.
class Products {
 public:
  explicit Products(Multiplicand);
  void multiply(const ProductShape&, const void* a, const void* b, void* t);

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
