#include "cuda/sm90/gathered_contraction.h"

namespace cadre::cuda::sm90 {

LaunchGatheredContraction find_gathered_contraction(const GatheredContractionKind& kind) {
  const auto of = [&]<DType kType>() -> LaunchGatheredContraction {
    if (kind.transposed) return launch_gathered_contraction<GatheredContractionKind{kType, true}>;
    return launch_gathered_contraction<GatheredContractionKind{kType, false}>;
  };
  return kind.type == DType::kBf16 ? of.operator()<DType::kBf16>() : of.operator()<DType::kF16>();
}

}  // namespace cadre::cuda::sm90
