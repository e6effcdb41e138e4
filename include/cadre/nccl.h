#pragma once
#include "cadre/collective.h"

struct ncclComm;  // as NCCL's own header has it, so that this one needs none

#pragma GCC visibility push(default)
namespace cadre {

/// The engine of a Collective by NCCL, of a build with CADRE_NCCL=ON: ncclSend and ncclRecv to and
/// from every rank, in one group. The communicator, an ncclComm_t that is blocking, is the caller's
/// and outlives it; its ranks are those of the problem, its device that of the plan.
/// Errors    DeviceError with the call that failed and what NCCL says of it; InvalidArgument where
///           the ranks of the problem are no multiple of the communicator's; Unsupported in a build
///           without NCCL.
AllToAll nccl_all_to_all(ncclComm* communicator);

}  // namespace cadre
#pragma GCC visibility pop
