#include "backend/pointers.h"

#include "cadre/error.h"

namespace cadre::cuda {

void write_pointers(std::span<const void* const>, const void**, Stream) {
  throw Unsupported("write_pointers: this build has no CUDA");
}

}  // namespace cadre::cuda
