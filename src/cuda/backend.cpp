// The implementation lists of the CUDA backend, best first; the only place that has them. No
// operation has a kernel yet, so planning for a GPU is refused.
#include "backend/lists.h"

namespace cadre::cuda {

using backend::Entries;

Entries<ActivationProblem, ActivationArgs> entries(backend::ActivationOp) { return {}; }
Entries<BiasGradProblem, BiasGradArgs> entries(backend::BiasGradOp) { return {}; }
Entries<DequantizeProblem, DequantizeArgs> entries(backend::DequantizeOp) { return {}; }
Entries<GroupedGemmProblem, GroupedGemmArgs> entries(backend::GroupedGemmOp) { return {}; }
Entries<OffsetsProblem, OffsetsArgs> entries(backend::OffsetsOp) { return {}; }
Entries<PermuteProblem, PermuteArgs> entries(backend::PermuteOp) { return {}; }
Entries<QuantizeProblem, QuantizeArgs> entries(backend::QuantizeOp) { return {}; }
Entries<RoutingProblem, RoutingArgs> entries(backend::RoutingOp) { return {}; }

}  // namespace cadre::cuda
