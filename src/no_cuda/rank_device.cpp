#include "parallel/rank_device.h"

#include "cadre/error.h"

namespace cadre::cuda {

std::unique_ptr<parallel::RankDevice> rank_device(const Device&) {
  throw Unsupported("window: this build has no CUDA backend; configure with the preset cuda");
}

}  // namespace cadre::cuda
