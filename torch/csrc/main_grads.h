#pragma once
#include <optional>
#include <vector>

#include "parameters.h"

namespace cadre::door {

/// What Python says about main_grad of the weights (torch/cadre/main_grad.py).
struct MainGrads {
  std::vector<at::Tensor> into;
  Accumulate accumulate = Accumulate::kNo;
  std::optional<at::Tensor> flags;    ///< see accumulate_words()
  std::vector<at::Tensor> stand_ins;  ///< what autograd gets as gradients
};

/// Asks Python, in one call. `weight` has the Python attributes.
MainGrads main_grads_of(const std::vector<at::Tensor>& weight, bool first_microbatch);

}  // namespace cadre::door
