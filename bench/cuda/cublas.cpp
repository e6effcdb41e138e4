#include "bench/cuda/cublas.h"

#include <dlfcn.h>

#include "bench/cuda/check.h"

namespace cadre::bench {
namespace {

constexpr const char* kLibrary = "libcublas.so.13";
constexpr size_t kWorkspaceBytes = 32 << 20;  // what cuBLAS recommends for Hopper

using Gemm = cublasStatus_t (*)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int,
                                const void*, const void*, cudaDataType, int, const void*,
                                cudaDataType, int, const void*, void*, cudaDataType, int,
                                cublasComputeType_t, cublasGemmAlgo_t);

struct Symbols {
  decltype(&cublasCreate_v2) create = nullptr;
  decltype(&cublasDestroy_v2) destroy = nullptr;
  decltype(&cublasSetStream_v2) set_stream = nullptr;
  decltype(&cublasSetWorkspace_v2) set_workspace = nullptr;
  Gemm gemm = nullptr;
};

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// Stays open until the process ends.
const Symbols* symbols() {
  static const Symbols all = [] {
    Symbols s;
    void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return Symbols{};
    const bool found = find(library, "cublasCreate_v2", s.create) &&
                       find(library, "cublasDestroy_v2", s.destroy) &&
                       find(library, "cublasSetStream_v2", s.set_stream) &&
                       find(library, "cublasSetWorkspace_v2", s.set_workspace) &&
                       find(library, "cublasGemmEx", s.gemm);
    return found ? s : Symbols{};
  }();
  return all.gemm ? &all : nullptr;
}

void check_cublas(cublasStatus_t status, std::string_view what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw DeviceError(text("bench: cuBLAS cannot ", what, ": status ", int(status)));
}

cudaDataType type_of(DType dtype) {
  return dtype == DType::kF32 ? CUDA_R_32F : dtype == DType::kBf16 ? CUDA_R_16BF : CUDA_R_16F;
}

}  // namespace

std::shared_ptr<Cublas> Cublas::open(cudaStream_t stream) {
  return symbols() ? std::make_shared<Cublas>(stream) : nullptr;
}

std::string Cublas::why_absent() {
  return text(kLibrary, " cannot be opened; put its folder into LD_LIBRARY_PATH");
}

Cublas::Cublas(cudaStream_t stream) {
  check_cublas(symbols()->create(&handle_), "make a handle");
  check_cublas(symbols()->set_stream(handle_, stream), "take a stream");
  check_cuda(cudaMalloc(&workspace_, kWorkspaceBytes), "take the workspace of cuBLAS");
  check_cublas(symbols()->set_workspace(handle_, workspace_, kWorkspaceBytes), "take a workspace");
}

Cublas::~Cublas() {
  symbols()->destroy(handle_);
  cudaFree(workspace_);
}

// cuBLAS is column-major, so it computes the transpose: out^T = b^T a^T.
void Cublas::multiply(const Sizes& s, const Matrix& a, const Matrix& b, const Matrix& out,
                      float beta) {
  const float one = 1;
  const auto op = [](const Matrix& m) { return m.transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
  check_cublas(symbols()->gemm(handle_, op(b), op(a), int(s.n), int(s.m), int(s.k), &one, b.data,
                               type_of(b.dtype), int(b.pitch), a.data, type_of(a.dtype),
                               int(a.pitch), &beta, const_cast<void*>(out.data), type_of(out.dtype),
                               int(out.pitch), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
               "multiply");
}

}  // namespace cadre::bench
