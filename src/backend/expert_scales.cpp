#include "backend/expert_scales.h"

namespace cadre::backend {

void multiply_scales(const Device& device, const ScaleFactors& of, Stream stream) {
  if (device.kind == DeviceKind::kCuda) return cuda::multiply_scales(of, stream);
  for (int e = 0; e < of.experts; ++e) of.product[e] = of.first[e] * of.second[e];
}

}  // namespace cadre::backend
