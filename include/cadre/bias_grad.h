#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "cadre/grouped_gemm.h"
#include "cadre/offsets.h"

#pragma GCC visibility push(default)
namespace cadre {

/// `bias_grad R=8192 N=2048 E=64 dy=bf16 dbias=bf16`.
struct BiasGradProblem {
  using Args = struct BiasGradArgs;
  static constexpr OperationText kOperation = {
      "bias_grad", "gradients of a bias per expert and of its scale per row",
      "bias_grad R=8192 N=2048 E=64"};

  int64_t rows = 0;            ///< R
  int64_t n = 0;               ///< N
  int experts = 1;             ///< E
  DType dy = DType::kBf16;     ///< f32, bf16 or f16
  DType dbias = DType::kBf16;  ///< f32, bf16 or f16
  bool discrete = false;       ///< dbias (and bias) are E pointers
  bool bias_scale = false;     ///< the bias was scaled per row; dbias_scale is wanted too
  DType bias = DType::kBf16;   ///< with bias_scale
  Accumulate accumulate = Accumulate::kNo;
  Tail tail = Tail::kKeep;  ///< of dbias_scale

  bool operator==(const BiasGradProblem&) const = default;
};

struct BiasGradArgs {
  TensorView dy{};                             ///< [R, N]
  Offsets offsets{};                           ///< which rows are whose
  TensorView dbias{};                          ///< [E, N], written; packed only
  void* const* discrete_dbias = nullptr;       ///< [E] pointers, each [N], written; discrete only
  const float* bias_scale = nullptr;           ///< [R]
  TensorView bias{};                           ///< [E, N], with bias_scale; packed only
  const void* const* discrete_bias = nullptr;  ///< [E] pointers, each [N]; discrete only
  float* dbias_scale = nullptr;                ///< [R], with bias_scale, written
  const int32_t* accumulate = nullptr;         ///< one word (kDevice) or [E] (kPerExpert)
};

using BiasGradPlan = Plan<BiasGradProblem>;

/// The gradient of a bias per expert, and of the factor per row that scaled it.
///
///   dbias[e, n] (+)= sum_r dy[r, n] bias_scale[r]      over the rows of expert e
///   dbias_scale[r] = sum_n dy[r, n] bias[e, n]
///
/// Types     sums in fp32, rounded once at the store.
/// Rows      the tail is not read; an empty expert's dbias is zero, untouched when accumulating.
/// Errors    InvalidArgument for shapes, types, strides, missing or surplus arguments.
/// Exact     rows in their order, columns in a fixed order; no atomics.
BiasGradPlan plan(const BiasGradProblem&, const Device&, std::string_view only = {});
void run(const BiasGradPlan&, const BiasGradArgs&, Workspace, Stream);

std::string to_string(const BiasGradProblem&);
BiasGradProblem parse_bias_grad_problem(std::string_view);

}  // namespace cadre
#pragma GCC visibility pop
