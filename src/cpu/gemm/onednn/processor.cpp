#include "cpu/gemm/processor.h"

#include <dnnl.hpp>

#include "cpu/gemm/cpuid.h"

namespace cadre::cpu::gemm {
namespace {

constexpr bool includes(dnnl::cpu_isa all, dnnl::cpu_isa one) {
  return (unsigned(all) & unsigned(one)) == unsigned(one);
}

/// oneDNN believes cpuid's word that there are matrix tiles. On some virtual machines the leaf that
/// says how large they are is empty, and then its kernels die of an illegal instruction. Where a
/// processor has tiles but oneDNN may not use them, its bf16 vector instructions are half as fast
/// as fp32's.
Processor ask_processor() {
  const dnnl::cpu_isa isa = dnnl::get_effective_cpu_isa();
  const bool tiles_used = includes(isa, dnnl::cpu_isa::avx512_core_amx);
  const bool good = tiles_used ? matrix_tiles_are_described() : !has_matrix_tiles();
  return {.bf16 = includes(isa, dnnl::cpu_isa::avx512_core_bf16) && good,
          .free_tiles = includes(isa, dnnl::cpu_isa::avx512_core),
          .matrix_tiles = tiles_used && good};
}

}  // namespace

const Processor& processor() {
  static const Processor kProcessor = ask_processor();
  return kProcessor;
}

}  // namespace cadre::cpu::gemm
