// The implementation lists of the CUDA backend, best first; the only place that has them. Planning
// for an operation whose list is empty is refused.
#include "backend/lists.h"
#include "cuda/portable/activation.h"
#include "cuda/portable/bias_grad.h"
#include "cuda/portable/cast.h"
#include "cuda/portable/grouped_gemm.h"
#include "cuda/portable/launch.h"
#include "cuda/portable/offsets.h"
#include "cuda/portable/permute.h"
#include "cuda/portable/routing.h"
#include "cuda/sm90/grouped_gemm.h"

namespace cadre::cuda {

using backend::Entries;
using backend::Entry;
using backend::no_workspace;

Entries<ActivationProblem, ActivationArgs> entries(backend::ActivationOp) {
  static constexpr Entry<ActivationProblem, ActivationArgs> kList[] = {
      {"cuda_activation", portable::needs_sm80, no_workspace, portable::activation},
  };
  return kList;
}

Entries<BiasGradProblem, BiasGradArgs> entries(backend::BiasGradOp) {
  static constexpr Entry<BiasGradProblem, BiasGradArgs> kList[] = {
      {"cuda_bias_grad", portable::needs_sm80, no_workspace, portable::bias_grad},
  };
  return kList;
}

Entries<DequantizeProblem, DequantizeArgs> entries(backend::DequantizeOp) {
  static constexpr Entry<DequantizeProblem, DequantizeArgs> kList[] = {
      {"cuda_cast", portable::refuses_cast, no_workspace, portable::cast},
  };
  return kList;
}

Entries<GroupedGemmProblem, GroupedGemmArgs> entries(backend::GroupedGemmOp) {
  static constexpr Entry<GroupedGemmProblem, GroupedGemmArgs> kList[] = {
      {"sm90_ragged_rows", sm90::refuses_ragged_rows, sm90::grouped_gemm_workspace_bytes,
       sm90::run_ragged_rows, true, sm90::check_ragged_rows},
      {"sm90_ragged_contraction", sm90::refuses_ragged_contraction,
       sm90::grouped_gemm_workspace_bytes, sm90::run_ragged_contraction, true,
       sm90::check_ragged_contraction},
      {"cuda_ragged_rows", portable::refuses_ragged_rows, no_workspace, portable::run_ragged_rows},
      {"cuda_ragged_contraction", portable::refuses_ragged_contraction, no_workspace,
       portable::run_ragged_contraction},
  };
  return kList;
}

Entries<OffsetsProblem, OffsetsArgs> entries(backend::OffsetsOp) {
  static constexpr Entry<OffsetsProblem, OffsetsArgs> kList[] = {
      {"cuda_offsets", portable::refuses_offsets, portable::offsets_workspace_bytes,
       portable::offsets},
  };
  return kList;
}

Entries<PermuteProblem, PermuteArgs> entries(backend::PermuteOp) {
  static constexpr Entry<PermuteProblem, PermuteArgs> kList[] = {
      {"cuda_permute", portable::needs_sm80, no_workspace, portable::permute},
  };
  return kList;
}

Entries<QuantizeProblem, QuantizeArgs> entries(backend::QuantizeOp) {
  static constexpr Entry<QuantizeProblem, QuantizeArgs> kList[] = {
      {"cuda_cast", portable::refuses_cast, no_workspace, portable::cast},
  };
  return kList;
}

Entries<RoutingProblem, RoutingArgs> entries(backend::RoutingOp) {
  static constexpr Entry<RoutingProblem, RoutingArgs> kList[] = {
      {"cuda_routing", portable::refuses_routing, no_workspace, portable::routing},
  };
  return kList;
}

}  // namespace cadre::cuda
