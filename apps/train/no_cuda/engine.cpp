// The symbols of apps/train/cuda in a build without CUDA.
#include "apps/train/engine.h"

#include "cadre/error.h"

namespace cadre::train {

std::unique_ptr<Engine> open_cuda_engine(const Device&) {
  throw Unsupported(
      "train: this build has no CUDA backend; configure with the preset cuda, or give --device "
      "cpu");
}

}  // namespace cadre::train
