#include "backend/poison.h"

#include "cuda/check.h"

namespace cadre::cuda {

void poison(Workspace memory, Stream stream) {
  check(cudaMemsetAsync(memory.data, 0xff, size_t(memory.bytes),
                        static_cast<cudaStream_t>(stream.handle)),
        "poison a workspace");
}

}  // namespace cadre::cuda
