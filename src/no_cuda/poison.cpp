#include "backend/poison.h"

#include "cadre/error.h"

namespace cadre::cuda {

void poison(Workspace, Stream) { throw Unsupported("poison: this build has no CUDA"); }

}  // namespace cadre::cuda
