#pragma once
#include <array>
#include <optional>
#include <string_view>

#include "parameters.h"

namespace cadre::door {

/// Which gradients backward computes. Forward keeps what these need.
using MlpWants = std::array<bool, 6>;
enum MlpWant : size_t { kDx, kDprob, kDw1, kDw2, kDbias, kDbias2Scale };

/// Which biases forward had: what it keeps depends on them. wgrad reads none.
using ExpertBiases = std::array<bool, 2>;

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
  std::string_view window{};  ///< the exchange that moves y, and dx, next; none: new memory
  std::optional<at::Tensor> place_of{};  ///< [R] int32: of its rows, where results are pushed
  bool x_in_codes = false;               ///< forward reads these, and only wgrad x itself
  std::optional<at::Tensor> x_codes{}, x_scales{};  ///< [R, H], [R, H / block]
};

/// The problem that a call states. Errors    ValueError for tensors that do not fit together.
GroupedMlpProblem problem_of(const MlpCall&);

/// The weights of both linears, and where their deferred gradients go.
struct ExpertDw {
  at::TensorList weight1, weight2, dweight1, dweight2;
  std::string_view accumulate;
};

/// dw as wgrad writes it: type, layout and alignment. Errors    ValueError for what does not fit
/// the weights.
void plan_dw(ParameterLayout&, LayerOptions&, const ExpertDw&, const at::Tensor& offsets);

}  // namespace cadre::door
