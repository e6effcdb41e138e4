#include "cpu/gemm/onednn/plain_products.h"

#include <omp.h>

#include "cpu/gemm/onednn/matmul.h"

namespace cadre::cpu::gemm {
namespace {

using dnnl::memory;

struct Matrix {
  int64_t rows, cols;
  memory::dims strides;
  memory::data_type type;

  memory::desc desc() const { return {{rows, cols}, type, strides}; }
  memory at(const void* data) const { return {desc(), cpu_engine(), const_cast<void*>(data)}; }
};

/// a, b and t of a product of bf16 numbers.
struct Bf16Matrices {
  Matrix a, b, t;

  explicit Bf16Matrices(const PlainShape& s)
      : a{s.height, s.depth, {s.a_step, 1}, memory::data_type::bf16},
        b{s.depth, s.width, {s.b_step, 1}, memory::data_type::bf16},
        t{s.height, s.width, {s.t_step, 1}, memory::data_type::f32} {
    if (s.a_by_columns) a.strides = {1, s.a_step};
  }
};

}  // namespace

PlainProducts::PlainProducts(Multiplicand type) : type_(type), stream_(cpu_engine()) {
  omp_set_num_threads(1);  // as for other products
}

void PlainProducts::multiply(const PlainShape& s, const void* a, const void* b, float* t) {
  if (type_ == Multiplicand::kBf16) return multiply_bf16(s, a, b, t);
  dnnl::error::wrap_c_api(
      dnnl_sgemm(s.a_by_columns ? 'T' : 'N', 'N', s.height, s.width, s.depth, 1.0f,
                 static_cast<const float*>(a), s.a_step, static_cast<const float*>(b), s.b_step,
                 s.accumulate ? 1.0f : 0.0f, t, s.t_step),
      "could not multiply");
}

/// One that learns all sizes when it runs: planning costs as much as a small product.
const dnnl::matmul& PlainProducts::bf16_product(const PlainShape& s) {
  dnnl::matmul& product = products_[2 * s.a_by_columns + s.accumulate];
  if (product) return product;
  constexpr int64_t kLater = DNNL_RUNTIME_DIM_VAL;
  const Bf16Matrices m({kLater, kLater, kLater, kLater, kLater, kLater, s.a_by_columns, false});
  return product = make_matmul({m.a.desc(), m.b.desc(), m.t.desc()}, s.accumulate);
}

void PlainProducts::multiply_bf16(const PlainShape& s, const void* a, const void* b, float* t) {
  const Bf16Matrices m(s);
  bf16_product(s).execute(
      stream_,
      {{DNNL_ARG_SRC, m.a.at(a)}, {DNNL_ARG_WEIGHTS, m.b.at(b)}, {DNNL_ARG_DST, m.t.at(t)}});
}

}  // namespace cadre::cpu::gemm
