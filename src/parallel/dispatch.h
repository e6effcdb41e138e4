#pragma once
#include <cstdint>

#include "cadre/expert_parallel.h"

namespace cadre::parallel {

/// The workspace of dispatch: the choices of all ranks among all experts, as rows in order. Bytes
/// from its start.
struct DispatchMemory {
  int64_t offsets = 0;                     ///< [P * E + 1] int32
  int64_t row_of = 0;                      ///< [P, T, top_k] int32
  int64_t slot_of = 0;                     ///< [P * T * top_k] int32
  int64_t scratch = 0, scratch_bytes = 0;  ///< of the sort
  int64_t bytes = 0;

  DispatchMemory(const ExpertParallelProblem&, const OffsetsPlan&);
};

}  // namespace cadre::parallel
