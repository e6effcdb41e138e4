#pragma once
#include <array>
#include <optional>
#include <string_view>

#include "parameters.h"

namespace cadre::door {

/// Which gradients backward computes. Forward keeps what these need.
using MlpWants = std::array<bool, 6>;
enum MlpWant : size_t { kDx, kDprob, kDw1, kDw2, kDbias, kDbias2Scale };

/// What all directions of an expert MLP are called with.
struct MlpCall {
  const at::Tensor& x;  ///< [R, H], contiguous
  const at::Tensor& offsets;
  const std::optional<at::Tensor>& prob;
  at::TensorList weight1, bias1, weight2, bias2;
  const std::optional<at::Tensor>& bias2_scale;
  const std::optional<at::Tensor>& rng;  ///< [2] int64: seed and offset
  MlpWants wants;
  std::string_view activation;
  std::string_view recipe;
  bool keep_h = false;
  int64_t unit_budget = 0;
};

/// The problem that a call states. Errors    ValueError for tensors that do not fit together.
GroupedMlpProblem problem_of(const MlpCall&);

}  // namespace cadre::door
