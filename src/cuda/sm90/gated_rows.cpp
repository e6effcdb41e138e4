#include "cuda/sm90/gated_rows.h"

namespace cadre::cuda::sm90 {

LaunchGatedRows find_gated_rows(DType type) {
  if (type == DType::kBf16) return launch_gated_rows<DType::kBf16>;
  return type == DType::kF16 ? launch_gated_rows<DType::kF16> : nullptr;
}

}  // namespace cadre::cuda::sm90
