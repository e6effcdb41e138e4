#pragma once
#include "cadre/device.h"
#include "cadre/stream.h"

namespace cadre {
namespace backend {

/// product[e] = first[e] * second[e], rounded once.
struct ScaleFactors {
  const float *first, *second;  ///< [E]
  float* product;               ///< [E]
  int experts;                  ///< E
};
void multiply_scales(const Device&, const ScaleFactors&, Stream);

}  // namespace backend

namespace cuda {

void multiply_scales(const backend::ScaleFactors&, Stream);

}  // namespace cuda
}  // namespace cadre
