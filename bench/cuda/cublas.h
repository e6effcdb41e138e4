#pragma once
#include <cublas_v2.h>

#include <memory>
#include <string>

#include "cadre/tensor.h"

namespace cadre::bench {

/// cuBLAS, opened at run time. Products run on the stream that it was made for.
class Cublas {
 public:
  /// Null where the library cannot be opened.
  static std::shared_ptr<Cublas> open(cudaStream_t);
  /// Which file was looked for, and what to do.
  static std::string why_absent();

  explicit Cublas(cudaStream_t);
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;
  ~Cublas();

  /// A row-major matrix, or the transpose of one.
  struct Matrix {
    const void* data;
    DType dtype;
    int64_t pitch;
    bool transposed;
  };
  struct Sizes {
    int64_t m, n, k;
  };
  /// out[m, n] = a[m, k] b[k, n] + beta * out, summed in fp32; `out` is not transposed.
  void multiply(const Sizes&, const Matrix& a, const Matrix& b, const Matrix& out, float beta);

 private:
  cublasHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
};

}  // namespace cadre::bench
