#pragma once

namespace cadre::cpu::gemm {

/// Whether the processor multiplies in matrix tiles (AMX, bf16).
bool has_matrix_tiles();

/// Whether it also says how large they are.
bool matrix_tiles_are_described();

/// Whether processor and system have AVX-512, as far as x86-64-v4 goes, and its bf16 products.
bool has_avx512();
bool has_avx512_bf16();

}  // namespace cadre::cpu::gemm
