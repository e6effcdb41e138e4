#pragma once
// Grouped GEMMs for programs in other languages that time their own peers beside them: plain C, no
// exception leaves. Operands are packed, weights one [E, N, K] tensor; plain ones are row-major,
// codes and block scales lie as the problem says (cadre/quantize.h), without gaps.

#include <cstdint>

extern "C" {

struct CadreGemm;  // a plan

struct CadreGemmArgs {
  const void* lhs;         // x (fprop), dy (dgrad, wgrad)
  const void* rhs;         // w (fprop, dgrad), x (wgrad)
  const int32_t* offsets;  // [E + 1], on the device
  void* out;
  void* workspace;                      // cadre_gemm_workspace_bytes of it, 256-byte aligned
  const void *lhs_scales, *rhs_scales;  // of codes: of blocks, or [E]; else null
};

/// Plans a problem without epilogue on "cpu", "cuda" or "cuda:1"; by the implementation `only`
/// unless that is null. Null on error.
CadreGemm* cadre_gemm_plan(const char* problem, const char* device, const char* only);
void cadre_gemm_free(CadreGemm*);
const char* cadre_gemm_name(const CadreGemm*);
long long cadre_gemm_workspace_bytes(const CadreGemm*);

/// Enqueues the product on a cudaStream_t. Not 0 on error.
int cadre_gemm_run(const CadreGemm*, const CadreGemmArgs*, void* stream);

/// What the last error of this thread was.
const char* cadre_gemm_error();
}
