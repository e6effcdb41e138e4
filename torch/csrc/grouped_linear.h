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

/// Whether backward reads the call's x. Forward keeps it then.
bool reads_x(const LinearCall&);

/// torch.ops.cadre.grouped_linear through the dispatcher: (y, saved).
std::tuple<at::Tensor, at::Tensor> linear_op(const LinearCall&);

/// dx, dweight, dbias, dbias_scale, pending.
using LinearGradients = std::tuple<at::Tensor, std::vector<at::Tensor>, std::vector<at::Tensor>,
                                   at::Tensor, at::Tensor>;

/// torch.ops.cadre.grouped_linear_backward through the dispatcher; the call's own x is not read.
LinearGradients linear_backward_op(const at::Tensor& dy, const at::Tensor& x,
                                   const at::Tensor& saved, const LinearCall&,
                                   std::optional<at::ScalarType> dweight_dtype = {});

/// The problem that a call states. Errors    ValueError for tensors that do not fit together.
GroupedLinearProblem problem_of(const LinearCall&);

/// Where forward writes.
struct ForwardOut {
  const at::Tensor &y, &saved;
  std::optional<at::Tensor> weight_cache{};
  bool refresh = true;
};
void run_forward(const LinearCall&, const GroupedLinearProblem&, const ForwardOut&);

/// Where backward writes; what is not wanted is empty.
struct BackwardOut {
  at::Tensor dx, dbias_scale, pending;
  at::TensorList dw{}, dbias{};
  std::optional<at::Tensor> weight_cache{};
  const int32_t* accumulate = nullptr;  ///< see accumulate_words()
};
void run_backward(const LinearCall&, const GroupedLinearProblem&,
                  const std::pair<at::Tensor, at::Tensor>& dy_and_saved, const BackwardOut&);

/// What wgrad is called with besides where it writes.
struct WgradCall {
  const at::Tensor &dy, &x, &saved, &pending;
  const std::optional<at::Tensor>& accumulate_flags;
};
void run_wgrad(const WgradCall&, const LinearCall&, Accumulate, at::TensorList dw);

/// dw as backward or wgrad writes it: type, layout and alignment. Errors    ValueError for what
/// does not fit the weights.
void plan_dw(GroupedLinearProblem&, const LinearCall&, at::TensorList dw, Accumulate);

}  // namespace cadre::door
