#pragma once
// Grouped GEMMs for programs in other languages that time their own peers beside them: plain C, no
// exception leaves. Operands are packed and row-major, weights one [E, N, K] tensor.

#include <cstdint>

extern "C" {

struct CadreGemm;  // a plan

struct CadreGemmArgs {
  const void* lhs;         // x (fprop), dy (dgrad, wgrad)
  const void* rhs;         // w (fprop, dgrad), x (wgrad)
  const int32_t* offsets;  // [E + 1], on the device
  void* out;
  void* workspace;  // cadre_gemm_workspace_bytes of it, 256-byte aligned
};

/// Plans a problem without epilogue on "cpu", "cuda" or "cuda:1". Null on error.
CadreGemm* cadre_gemm_plan(const char* problem, const char* device);
void cadre_gemm_free(CadreGemm*);
const char* cadre_gemm_name(const CadreGemm*);
long long cadre_gemm_workspace_bytes(const CadreGemm*);

/// Enqueues the product on a cudaStream_t. Not 0 on error.
int cadre_gemm_run(const CadreGemm*, const CadreGemmArgs*, void* stream);

/// What the last error of this thread was.
const char* cadre_gemm_error();
}
