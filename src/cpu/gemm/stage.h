#pragma once
#include "cpu/gemm/operand_lines.h"
#include "cpu/gemm/products.h"

// Copies a part of an operand into the layout that Products takes, decoded, transposed where need
// be, and padded with zeros.
namespace cadre::cpu::gemm {

/// Lines [line, line + lines) of an expert, and elements [from, from + count) of each.
struct Part {
  int expert = 0;
  int64_t first = 0;  ///< routed rows: the expert's first row of codes
  int64_t line = 0, lines = 0;
  int64_t from = 0, count = 0;
};

/// Where a part goes: `outer` rows of a, or columns of b; `depth` along the contraction; padded.
struct Staged {
  void* data = nullptr;
  Multiplicand type = Multiplicand::kF32;
  int64_t outer = 0, depth = 0;
};

/// Whether a line runs along the contraction, or across it.
enum class Along : uint8_t { kDepth, kOuter };

/// Into a: [outer, depth] row-major.
void stage_a(const OperandLines&, Along, const Part&, const Staged&);

/// Into b: columns of 64, or one column where `outer` is below that.
void stage_b(const OperandLines&, Along, const Part&, const Staged&);

}  // namespace cadre::cpu::gemm
