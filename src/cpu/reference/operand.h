#pragma once
#include <vector>

#include "cadre/grouped_gemm.h"

namespace cadre::cpu::reference {

/// A matrix of doubles, row-major.
struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<double> values;

  double& at(int64_t i, int64_t j) { return values[size_t(i * cols + j)]; }
  double at(int64_t i, int64_t j) const { return values[size_t(i * cols + j)]; }
};

/// One expert's part of an operand, straight from codes and scales: the weight [N, K], or the
/// `rows` of codes of routed rows. Plain operands may have any strides.
///
///   value = code * block scale * expert scale
Matrix decode(const Operand&, const QuantizedShape&, int expert, CodeRows rows);

}  // namespace cadre::cpu::reference
