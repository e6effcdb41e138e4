// The implementation lists of the CUDA backend, best first; the only place that has them.
// Operations with an empty list have no kernel yet: planning one for a GPU is refused.
#include "backend/entry.h"
#include "backend/lists.h"
#include "cuda/sm90/grouped_gemm.h"

namespace cadre::cuda {

using backend::Entries;
using backend::Entry;

namespace {

constexpr Entry<GroupedGemmProblem, GroupedGemmArgs> kGroupedGemm[] = {
    {"sm90_ragged_rows", sm90::refuses_ragged_rows, sm90::grouped_gemm_workspace_bytes,
     sm90::run_ragged_rows},
    {"sm90_ragged_contraction", sm90::refuses_ragged_contraction,
     sm90::grouped_gemm_workspace_bytes, sm90::run_ragged_contraction},
};

}  // namespace

Entries<ActivationProblem, ActivationArgs> entries(backend::ActivationOp) { return {}; }
Entries<BiasGradProblem, BiasGradArgs> entries(backend::BiasGradOp) { return {}; }
Entries<DequantizeProblem, DequantizeArgs> entries(backend::DequantizeOp) { return {}; }
Entries<GroupedGemmProblem, GroupedGemmArgs> entries(backend::GroupedGemmOp) {
  return kGroupedGemm;
}
Entries<OffsetsProblem, OffsetsArgs> entries(backend::OffsetsOp) { return {}; }
Entries<PermuteProblem, PermuteArgs> entries(backend::PermuteOp) { return {}; }
Entries<QuantizeProblem, QuantizeArgs> entries(backend::QuantizeOp) { return {}; }
Entries<RoutingProblem, RoutingArgs> entries(backend::RoutingOp) { return {}; }

}  // namespace cadre::cuda
