#include "cadre/nccl.h"

#include "cadre/error.h"

namespace cadre {

AllToAll nccl_all_to_all(ncclComm*) {
  throw Unsupported("nccl: this build has no NCCL; configure with -DCADRE_CUDA=ON -DCADRE_NCCL=ON");
}

}  // namespace cadre
