#pragma once
#include <cstdint>
#include <optional>

#include "cadre/grouped_gemm.h"

namespace cadre::train {

/// A plain linear map: the library's grouped GEMM with one expert.
///
///   y = x w^T,   dx = dy w,   dw = dy^T x
///
/// Shapes    x, dx [T, K]   y, dy [T, N]   w, dw [N, K]
/// Types     x, w and dy have `dtype`; y, dx and dw are f32.
class Dense {
 public:
  struct Shape {
    int64_t rows = 0, n = 0, k = 0;
    DType dtype = DType::kF32;
    bool backward = true;
  };

  Dense(const Shape&, const Device&);
  int64_t workspace_bytes() const;

  void forward(const void* x, const void* w, float* y, Workspace) const;
  void input_gradient(const void* dy, const void* w, float* dx, Workspace) const;
  void weight_gradient(const void* dy, const void* x, float* dw, Workspace) const;

 private:
  Offsets all_rows() const { return {offsets_, 1}; }

  Shape shape_;
  int32_t offsets_[2] = {0, 0};
  GroupedGemmPlan fprop_;
  std::optional<GroupedGemmPlan> dgrad_, wgrad_;
};

}  // namespace cadre::train
