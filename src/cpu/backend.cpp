// The CPU's implementation lists, best first; the only place that has them. The walk takes the
// first entry that does not refuse, and the last one, the reference, takes everything.
#include "backend/lists.h"

namespace cadre::cpu {

using backend::Entries;

Entries<ActivationProblem, ActivationArgs> entries(backend::ActivationOp) { return {}; }

Entries<BiasGradProblem, BiasGradArgs> entries(backend::BiasGradOp) { return {}; }

Entries<DequantizeProblem, DequantizeArgs> entries(backend::DequantizeOp) { return {}; }

Entries<GroupedGemmProblem, GroupedGemmArgs> entries(backend::GroupedGemmOp) { return {}; }

Entries<OffsetsProblem, OffsetsArgs> entries(backend::OffsetsOp) { return {}; }

Entries<PermuteProblem, PermuteArgs> entries(backend::PermuteOp) { return {}; }

Entries<QuantizeProblem, QuantizeArgs> entries(backend::QuantizeOp) { return {}; }

Entries<RoutingProblem, RoutingArgs> entries(backend::RoutingOp) { return {}; }

}  // namespace cadre::cpu
