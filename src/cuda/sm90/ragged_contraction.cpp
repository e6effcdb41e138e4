#include "cuda/sm90/ragged_contraction.h"

namespace cadre::cuda::sm90 {
namespace {

struct Instance {
  RaggedContractionKind kind;
  LaunchRaggedContraction launch;
};

template <RaggedContractionKind kKind>
constexpr Instance instance() {
  return {kKind, launch_ragged_contraction<kKind>};
}

constexpr Instance kInstances[] = {
    instance<RaggedContractionKind{DType::kBf16, DType::kBf16}>(),
    instance<RaggedContractionKind{DType::kBf16, DType::kF32}>(),
    instance<RaggedContractionKind{DType::kF16, DType::kF16}>(),
    instance<RaggedContractionKind{DType::kF16, DType::kF32}>(),
};

}  // namespace

LaunchRaggedContraction find_ragged_contraction(const RaggedContractionKind& kind) {
  for (const Instance& instance : kInstances)
    if (instance.kind == kind) return instance.launch;
  return nullptr;
}

}  // namespace cadre::cuda::sm90
