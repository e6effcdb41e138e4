#pragma once
#include <string>

#include "cadre/grouped_gemm.h"

// Why a way to multiply does not take a problem; empty if it does. Several ways have these in
// common.
namespace cadre::cpu::gemm {

/// Of whoever reads lines of codes with the scales of their rows.
std::string refuses_order(const GroupedGemmProblem&);

/// Of bf16 products: the processor must be good at them, the operands bf16 numbers but for a scale
/// per expert, and their order as above.
std::string refuses_bf16(const GroupedGemmProblem&);

}  // namespace cadre::cpu::gemm
