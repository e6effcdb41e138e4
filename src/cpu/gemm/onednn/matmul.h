#pragma once
#include <dnnl.hpp>

namespace cadre::cpu::gemm {

/// oneDNN's handle of this processor.
inline const dnnl::engine& cpu_engine() {
  static const dnnl::engine kEngine(dnnl::engine::kind::cpu, 0);
  return kEngine;
}

/// The operands of t (+)= a * b.
struct MatmulOperands {
  const dnnl::memory::desc &a, &b, &t;
};

/// oneDNN 2 wants a description of the operation before it plans it, oneDNN 3 has none.
template <class Matmul = dnnl::matmul>
Matmul make_matmul(const MatmulOperands& m, bool accumulate) {
  dnnl::primitive_attr attributes;
  if (accumulate) {
    dnnl::post_ops sum;
    sum.append_sum();
    attributes.set_post_ops(sum);
  }
  if constexpr (requires { typename Matmul::desc; })
    return Matmul({typename Matmul::desc(m.a, m.b, m.t), attributes, cpu_engine()});
  else
    return Matmul({cpu_engine(), m.a, m.b, m.t, attributes});
}

}  // namespace cadre::cpu::gemm
