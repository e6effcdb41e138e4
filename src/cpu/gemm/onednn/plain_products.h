#pragma once
#include <array>
#include <cstdint>
#include <dnnl.hpp>

#include "cpu/gemm/products.h"

namespace cadre::cpu::gemm {

/// t[height, width] (+)= a[height, depth] * b[depth, width]
///
/// All three lie as their owner stored them: rows of consecutive elements, so many elements apart;
/// `a_by_columns`: a's columns are what is consecutive.
struct PlainShape {
  int64_t height = 0, depth = 0, width = 0;
  int64_t a_step = 0, b_step = 0, t_step = 0;
  bool a_by_columns = false;
  bool accumulate = false;
};

/// The products of one thread on operands where they lie: no staging, and the way of b from memory
/// is hidden behind the product. With AVX-512 an element's bits depend neither on the height, from
/// two on, nor on the width, as long as the depth is at most kDepth.
class PlainProducts {
 public:
  static constexpr int64_t kDepth = 384;

  explicit PlainProducts(Multiplicand);
  void multiply(const PlainShape&, const void* a, const void* b, float* t);

 private:
  const dnnl::matmul& bf16_product(const PlainShape&);
  void multiply_bf16(const PlainShape&, const void* a, const void* b, float* t);

  Multiplicand type_;
  dnnl::stream stream_;
  std::array<dnnl::matmul, 4> products_;
};

}  // namespace cadre::cpu::gemm
