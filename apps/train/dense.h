#pragma once
#include <cstdint>
#include <optional>

#include "apps/train/buffer.h"
#include "cadre/grouped_gemm.h"

namespace cadre::train {

/// How the products of one linear map will run.
struct DensePlans {
  struct Shape {
    int64_t rows = 0, n = 0, k = 0;
    DType dtype = DType::kF32;
    bool backward = true;
  };
  Shape shape;
  GroupedGemmPlan fprop;
  std::optional<GroupedGemmPlan> dgrad, wgrad;

  int64_t workspace_bytes() const;
};

DensePlans plan_dense(const DensePlans::Shape&, const Device&);

/// A plain linear map: the library's grouped GEMM with one expert.
///
///   y = x w^T,   dx = dy w,   dw = dy^T x
///
/// Shapes    x, dx [T, K]   y, dy [T, N]   w, dw [N, K]
/// Types     x, w and dy have `dtype`; y, dx and dw are f32.
class Dense {
 public:
  Dense(const DensePlans&, Engine&);

  void forward(const void* x, const void* w, float* y, Workspace) const;
  void input_gradient(const void* dy, const void* w, float* dx, Workspace) const;
  void weight_gradient(const void* dy, const void* x, float* dw, Workspace) const;

 private:
  Offsets all_rows() const { return {offsets_.data(), 1}; }

  DensePlans plans_;
  Stream stream_;
  Buffer<int32_t> offsets_;  ///< 0 and all rows
};

}  // namespace cadre::train
