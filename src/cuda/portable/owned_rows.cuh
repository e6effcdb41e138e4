#pragma once
#include "cuda/portable/row_grid.h"
#include "schedule/expert_rows.h"

namespace cadre::cuda::portable {

/// The rows that ExpertWalk gives to some expert: from the first offset up to the highest; all of
/// them without offsets. All threads of a RowGrid's block must call it.
__device__ inline schedule::ExpertRows owned_rows(const int32_t* offsets, int experts,
                                                  int64_t bound) {
  if (offsets == nullptr) return {0, bound};
  __shared__ int highest;
  const int thread = int(threadIdx.x + kLanes * (threadIdx.y + blockDim.y * threadIdx.z));
  if (thread == 0) highest = 0;
  __syncthreads();
  int mine = 0;
  for (int e = thread; e <= experts; e += kGridWarps * kLanes)
    mine = max(mine, int(schedule::clamp_row(offsets[e], 0, bound)));
  atomicMax(&highest, mine);
  __syncthreads();
  return {schedule::clamp_row(offsets[0], 0, bound), highest};
}

}  // namespace cadre::cuda::portable
