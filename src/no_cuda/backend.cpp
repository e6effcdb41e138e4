// The symbols of src/cuda/backend.cpp in a build without CUDA: every operation has one entry, and
// it refuses with the reason.
#include "backend/lists.h"

namespace cadre::cuda {
namespace {

template <class Problem>
std::string refuses(const Problem&, const Device&) {
  return "this build has no CUDA backend; configure with the preset cuda";
}

template <class Problem, class Args>
backend::Entries<Problem, Args> list() {
  static constexpr backend::Entry<Problem, Args> kEntry{
      .name = "cuda", .refuses = refuses<Problem>, .workspace_bytes = nullptr, .run = nullptr};
  return {&kEntry, 1};
}

}  // namespace

backend::Entries<ActivationProblem, ActivationArgs> entries(backend::ActivationOp) {
  return list<ActivationProblem, ActivationArgs>();
}
backend::Entries<BiasGradProblem, BiasGradArgs> entries(backend::BiasGradOp) {
  return list<BiasGradProblem, BiasGradArgs>();
}
backend::Entries<DequantizeProblem, DequantizeArgs> entries(backend::DequantizeOp) {
  return list<DequantizeProblem, DequantizeArgs>();
}
backend::Entries<GroupedGemmProblem, GroupedGemmArgs> entries(backend::GroupedGemmOp) {
  return list<GroupedGemmProblem, GroupedGemmArgs>();
}
backend::Entries<OffsetsProblem, OffsetsArgs> entries(backend::OffsetsOp) {
  return list<OffsetsProblem, OffsetsArgs>();
}
backend::Entries<PermuteProblem, PermuteArgs> entries(backend::PermuteOp) {
  return list<PermuteProblem, PermuteArgs>();
}
backend::Entries<QuantizeProblem, QuantizeArgs> entries(backend::QuantizeOp) {
  return list<QuantizeProblem, QuantizeArgs>();
}
backend::Entries<RoutingProblem, RoutingArgs> entries(backend::RoutingOp) {
  return list<RoutingProblem, RoutingArgs>();
}

}  // namespace cadre::cuda
