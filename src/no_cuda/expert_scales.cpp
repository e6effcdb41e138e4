#include "backend/expert_scales.h"

#include "cadre/error.h"

namespace cadre::cuda {

void multiply_scales(const backend::ScaleFactors&, Stream) {
  throw Unsupported("multiply_scales: this build has no CUDA");
}

}  // namespace cadre::cuda
