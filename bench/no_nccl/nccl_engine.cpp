#include "bench/nccl_engine.h"

#include "cadre/error.h"

namespace cadre::bench {

void require_nccl(const ExpertParallelPlan& plan) {
  throw Unsupported(text("expert_parallel: ranks on ", to_string(plan.device),
                         " exchange rows by NCCL, which this build has not; configure with "
                         "-DCADRE_CUDA=ON -DCADRE_NCCL=ON, or take --device cpu [",
                         to_string(plan.problem), "]"));
}

AllToAll nccl_engine(Rank&, int) { return {}; }  // of ranks that have been refused

}  // namespace cadre::bench
