#include "cpu/gemm/processor.h"

#include "cpu/gemm/cpuid.h"

namespace cadre::cpu::gemm {
namespace {

/// Without oneDNN nobody uses matrix tiles, and a processor that has them is half as fast at bf16
/// vector instructions as at fp32's.
Processor ask_processor() {
  return {.bf16 = has_avx512() && has_avx512_bf16() && !has_matrix_tiles(),
          .free_tiles = has_avx512(),
          .matrix_tiles = false};
}

}  // namespace

const Processor& processor() {
  static const Processor kProcessor = ask_processor();
  return kProcessor;
}

}  // namespace cadre::cpu::gemm
