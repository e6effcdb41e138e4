#include "cuda/sm90/gathered_products.h"

namespace cadre::cuda::sm90 {

LaunchGatheredProducts find_gathered_products(const GatheredProductsKind& kind) {
  using Kind = GatheredProductsKind;
  if (kind.type == DType::kBf16)
    return kind.k_major ? launch_gathered_products<Kind{true, DType::kBf16}>
                        : launch_gathered_products<Kind{false, DType::kBf16}>;
  return kind.k_major ? launch_gathered_products<Kind{true, DType::kF16}>
                      : launch_gathered_products<Kind{false, DType::kF16}>;
}

}  // namespace cadre::cuda::sm90
