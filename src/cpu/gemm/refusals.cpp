#include "cpu/gemm/refusals.h"

#include "cadre/error.h"
#include "cpu/gemm/processor.h"

namespace cadre::cpu::gemm {
namespace {

/// True if a code times its block scale is a bf16 number, whatever both are. mxfp8 and mxfp4 are
/// not among them: their scales reach beyond bf16's smallest numbers.
bool is_bf16(FormatKind kind) {
  return kind == FormatKind::kBf16 || kind == FormatKind::kFp8Tensor || kind == FormatKind::kNvfp4;
}

}  // namespace

std::string refuses_order(const GroupedGemmProblem& p) {
  const bool codes = !is_plain(p.rhs) && p.rhs_major == Major::kColumn;
  const bool scales = p.lhs_scales_major == Major::kColumn || p.rhs_scales_major == Major::kColumn;
  return codes || scales ? "takes row-major codes and scales" : "";
}

std::string refuses_bf16(const GroupedGemmProblem& p) {
  for (const Format& format : {p.lhs, p.rhs})
    if (!is_bf16(format.kind))
      return text("takes operands whose decoded codes are bf16 numbers, not ", to_string(format));
  if (!processor().bf16)
    return "bf16 products are missing, unsafe or slower than fp32 on this processor";
  return refuses_order(p);
}

}  // namespace cadre::cpu::gemm
