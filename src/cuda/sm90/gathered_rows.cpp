#include "cuda/sm90/gathered_rows.h"

namespace cadre::cuda::sm90 {

LaunchGatheredRows find_gathered_rows(DType type) {
  if (type == DType::kBf16) return launch_gathered_rows<DType::kBf16>;
  return type == DType::kF16 ? launch_gathered_rows<DType::kF16> : nullptr;
}

}  // namespace cadre::cuda::sm90
