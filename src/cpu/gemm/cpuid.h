#pragma once

namespace cadre::cpu::gemm {

/// Whether the processor multiplies in matrix tiles (AMX, bf16).
bool has_matrix_tiles();

/// Whether it also says how large they are.
bool matrix_tiles_are_described();

}  // namespace cadre::cpu::gemm
