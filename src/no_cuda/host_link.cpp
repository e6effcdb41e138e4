#include "parallel/host_link.h"

#include "cadre/error.h"

namespace cadre::cuda {

std::unique_ptr<parallel::HostLink> host_link(const Device&, int64_t) {
  throw Unsupported("collective: this build has no CUDA backend; configure with the preset cuda");
}

}  // namespace cadre::cuda
