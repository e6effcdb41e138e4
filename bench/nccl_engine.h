#pragma once
#include "bench/ranks.h"
#include "cadre/collective.h"

namespace cadre::bench {

/// Errors    Unsupported in a build without NCCL, with what to do.
void require_nccl(const ExpertParallelPlan&);

/// The engine of ranks that are threads, each with a GPU of its own that is its thread's: a
/// communicator of NCCL, which lives as long as the engine. Every rank calls it.
/// Errors    DeviceError with what NCCL says, as of ranks that share a GPU.
AllToAll nccl_engine(Rank&, int ranks);

}  // namespace cadre::bench
