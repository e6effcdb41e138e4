#pragma once
#include "schedule/expert_rows.h"

namespace cadre::cuda::portable {

/// The rows that ExpertWalk gives to some expert; all of them without offsets.
__device__ inline schedule::ExpertRows owned_rows(const int32_t* offsets, int experts,
                                                  int64_t bound) {
  if (offsets == nullptr) return {0, bound};
  const int64_t used = schedule::rows_used(offsets, experts, bound);
  return {schedule::clamp_row(offsets[0], 0, used), used};
}

}  // namespace cadre::cuda::portable
