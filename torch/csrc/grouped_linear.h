#pragma once
#include <array>
#include <optional>
#include <string_view>
#include <vector>

#include "parameters.h"

namespace cadre::door {

/// Which gradients backward computes. Forward keeps what these need.
using LinearWants = std::array<bool, 4>;
constexpr size_t kWantsDx = 0, kWantsDw = 1, kWantsDbias = 2, kWantsDbiasScale = 3;

/// What all directions of a linear layer are called with.
struct LinearCall {
  const at::Tensor& x;  ///< [R, K], contiguous
  const at::Tensor& offsets;
  at::TensorList weight, bias;
  const std::optional<at::Tensor>& bias_scale;
  const std::optional<at::Tensor>& rng;  ///< [2] int64: seed and offset
  LinearWants wants;
  std::string_view recipe;
  bool save_input = false;
  int64_t unit_budget = 0;
};

/// The problem that a call states. Errors    ValueError for tensors that do not fit together.
GroupedLinearProblem problem_of(const LinearCall&);

}  // namespace cadre::door
