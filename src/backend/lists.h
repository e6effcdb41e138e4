#pragma once
#include "backend/entry.h"
#include "cadre/activation.h"
#include "cadre/bias_grad.h"
#include "cadre/dequantize.h"
#include "cadre/grouped_gemm.h"
#include "cadre/offsets.h"
#include "cadre/permute.h"
#include "cadre/quantize.h"
#include "cadre/routing.h"

// The implementation lists of every backend, one overload an operation. `Of<Problem, Args>` only
// names the operation.
namespace cadre {
namespace backend {

template <class Problem, class Args>
struct Of {};

using ActivationOp = Of<ActivationProblem, ActivationArgs>;
using BiasGradOp = Of<BiasGradProblem, BiasGradArgs>;
using DequantizeOp = Of<DequantizeProblem, DequantizeArgs>;
using GroupedGemmOp = Of<GroupedGemmProblem, GroupedGemmArgs>;
using OffsetsOp = Of<OffsetsProblem, OffsetsArgs>;
using PermuteOp = Of<PermuteProblem, PermuteArgs>;
using QuantizeOp = Of<QuantizeProblem, QuantizeArgs>;
using RoutingOp = Of<RoutingProblem, RoutingArgs>;

}  // namespace backend

#define CADRE_LISTS(room)                                                                \
  namespace room {                                                                       \
  backend::Entries<ActivationProblem, ActivationArgs> entries(backend::ActivationOp);    \
  backend::Entries<BiasGradProblem, BiasGradArgs> entries(backend::BiasGradOp);          \
  backend::Entries<DequantizeProblem, DequantizeArgs> entries(backend::DequantizeOp);    \
  backend::Entries<GroupedGemmProblem, GroupedGemmArgs> entries(backend::GroupedGemmOp); \
  backend::Entries<OffsetsProblem, OffsetsArgs> entries(backend::OffsetsOp);             \
  backend::Entries<PermuteProblem, PermuteArgs> entries(backend::PermuteOp);             \
  backend::Entries<QuantizeProblem, QuantizeArgs> entries(backend::QuantizeOp);          \
  backend::Entries<RoutingProblem, RoutingArgs> entries(backend::RoutingOp);             \
  }

CADRE_LISTS(cpu)
CADRE_LISTS(cuda)

#undef CADRE_LISTS

}  // namespace cadre
