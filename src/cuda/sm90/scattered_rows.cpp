#include "cuda/sm90/scattered_rows.h"

namespace cadre::cuda::sm90 {

LaunchScatteredRows find_scattered_rows(const ScatteredRowsKind& kind) {
  using Kind = ScatteredRowsKind;
  if (kind.type == DType::kBf16)
    return kind.k_major ? launch_scattered_rows<Kind{true, DType::kBf16}>
                        : launch_scattered_rows<Kind{false, DType::kBf16}>;
  return kind.k_major ? launch_scattered_rows<Kind{true, DType::kF16}>
                      : launch_scattered_rows<Kind{false, DType::kF16}>;
}

}  // namespace cadre::cuda::sm90
